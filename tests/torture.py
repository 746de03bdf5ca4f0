"""Misfortunes with fixed seeds: kills, damaged files, wild command lines and hostile records.

Each trial is a function of its number, which seeds what it draws; it returns what went wrong, or an empty text.
`python -m tests.torture [SHARE] [--write]`, the long round, prints a table and every fault. SHARE of all trials is
done, 1 where none is given; `--write` puts the table into `results/reliability.md`.
"""

import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors

import fedcli
from fedcli import registry
from fedcli.cli import app
from fedcli.core.client_states import stored
from fedcli.core.tree_files import CHECKPOINT, DIGEST, ZEROS, read_verified
from fedcli.core.trees import to_names
from fedcli.data import datasets
from fedcli.declarations import Method, facts_of
from fedcli.errors import UserError
from fedcli.figures import line_charts, report, saving
from fedcli.measure import quality
from fedcli.results import claims, tables
from fedcli.results.frame import clients_of, find_records, of_all, rounds_of
from fedcli.results.render import render
from fedcli.runs import resume
from fedcli.runs.checkpoints import Checkpoint, read_checkpoint
from fedcli.runs.exports import export
from fedcli.runs.identity import digest_of
from fedcli.runs.models import ROUNDS, SELECTED
from fedcli.runs.options import recorded_fields
from fedcli.runs.record import RECORD, params_hash, read_record, write_record
from fedcli.runs.resolve import default_dataset
from fedcli.runs.rounds import Listener
from fedcli.runs.schema import FIRST_OPTIONS
from fedcli.userfiles import file_hash
from tests import laws
from tests.on_made_up import early_captures, on_cpu, on_device, on_made_up_device
from tests.programs import SMALL, start
from tests.tiny_runs import TINY, Stop, StopAfter, contents, essence, file_names
from tests.toys import quick

PAGE = Path(__file__).parents[1] / "results" / "reliability.md"
COMMITTED = PAGE.parent / "records"
BEGIN_MARK = "<!-- trials: written by 'make torture' -->"
END_MARK = "<!-- trials: end -->"


# Commands in forks of this process, which has imported everything, so that they cost milliseconds

MEMORY = 4 << 30  # bytes that a command may ask for beyond what this process has
GRACE = 20  # seconds in which an interrupted command must end


class Ended(NamedTuple):
    """How a command ended: its exit code, minus a signal's number, and what it printed."""

    code: int
    output: str
    errors: str

    @property
    def fault(self) -> str:
        """What is wrong with this end, whatever the command was; empty for a good end."""
        printed = self.output + self.errors
        error_lines = self.errors.strip().splitlines()
        if "Traceback (most recent call last)" in printed:
            return error_lines[-1]
        if self.code not in (0, 1, 2, 130):
            return f"exit code {self.code}"  # -9 where it hung
        if self.code and not printed.strip():
            return f"exit code {self.code} without a word"
        has_error = any(line.startswith("error: ") for line in error_lines)
        if has_error and not error_lines[-1].startswith("error: "):
            return "an error of several lines"
        if "\x1b" in printed:
            return "an escape sequence"
        return ""


def import_commands() -> None:
    """Imports what commands import late, by a run with its table."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    registry.methods()
    with TemporaryDirectory() as folder:
        run = fedcli.run("fedavg", out=Path(folder, "run"), **{**TINY, "rounds": 1})
        run_command(Path(folder), "table", run.path)


def run_command(folder: Path, *arguments: object, seconds: float = 60) -> Ended:
    """Runs `fedcli` with arguments in a folder."""
    return fork(app.main, seconds, folder, *arguments)


def fork(action: Callable[[], object], seconds: float = 60, folder: Path = Path(), *arguments: object) -> Ended:
    """Does something in a process of its own; after so many seconds it is interrupted, and then killed."""

    def limited() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pages, *_ = Path("/proc/self/statm").read_text().split()
        limit = int(pages) * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        action()

    program = start(folder, *arguments, main=limited)
    program.join(seconds)
    if program.is_alive():
        program.send_signal(signal.SIGINT)
        program.join(GRACE)
    if program.is_alive():
        program.send_signal(signal.SIGKILL)
    output, errors = program.communicate()
    return Ended(program.returncode, output, errors)


# Kills, also while a file is written

KILLED = (
    "fedavg", "scaffold", "fedproto", "fedfm", "feddyn", "moon", "local", "fedgen", "fedtgp", "fedcme", "fml",
    "fccl-plus",
)  # fmt: skip
KILLS = 4  # of a run, until it may end
MOMENTS = 24  # at most, until a kill; a round has about 12


def options_of_small_run(method: Method) -> dict[str, Any]:
    """Options of a run that takes a second, with a checkpoint after every round and states that are spilled to disk."""
    options = {**TINY, "dataset": default_dataset(method), "checkpoint_every": 1, "state_memory": "300K"}
    if method.uses_public_data:
        options |= {"public_examples": 12, "public_batch_size": 5}
    return options


class KillsItself(Listener):
    """Kills its process at the so-many-th moment: in a batch, in a file half written, before or after its renaming."""

    def __init__(self, moments: int):
        self.left = moments
        fsync = os.fsync
        replace = Path.replace

        def half_written(file: int) -> None:
            if self.left == 1:
                os.ftruncate(file, os.fstat(file).st_size // 2)
            self.pass_moment()
            fsync(file)

        def renamed(path: Path, target: Path) -> None:
            self.pass_moment()
            replace(path, target)
            self.pass_moment()

        os.fsync = half_written
        Path.replace = renamed

    def pass_moment(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def samples(self, count: int) -> None:
        self.pass_moment()


def kill_repeatedly(number: int) -> str:
    """A run that is killed four times at random moments ends in the same numbers and leaves the same files."""
    draw = random.Random(number)
    method = registry.find_method(KILLED[number % len(KILLED)])
    options = options_of_small_run(method)
    with TemporaryDirectory() as parent:
        whole = Path(parent, "whole")
        killed = Path(parent, "killed")
        fedcli.run(method.name, out=whole, **options)

        for kills in range(KILLS + 1):
            moments = draw.randint(1, MOMENTS) if kills < KILLS else -1  # the last time it is left alone
            go_on = partial(fedcli.run, method.name, out=killed, continue_=True, **options)
            end = fork(lambda: go_on(progress=KillsItself(moments)))  # noqa: B023
            if end.code == 0 and kills > 0:
                break
            if end.code != -signal.SIGKILL:
                return f"{method.name}: {end.errors.strip()}"

        record = read_record(killed)
        expected = read_record(whole)
        if essence(record)["rounds"] != essence(expected)["rounds"] or record["summary"] != expected["summary"]:
            return f"{method.name}: other numbers"
        if file_names(killed) != file_names(whole):
            return f"{method.name}: other files"
        return ""


# Damaged, cut and exchanged files

FEATURES = "finished, with features"
STOPPED_RUNS = {
    "global model": {"method": "fedfm"},
    "client state": {"method": "scaffold"},
    "personal": {"method": "local"},
    "heterogeneous": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "backbone": None},
    "public": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 12, "public_batch_size": 6,
        "cohort_size": 4,
    },
    "server training": {"method": "fedgen"},
    FEATURES: {"method": "fedavg"},
}  # fmt: skip


class StoppedRun(NamedTuple):
    """A run that stopped after two of three rounds, unless its kind says finished, and one with another seed."""

    folder: Path
    other_folder: Path
    outcome: str  # see `outcome_of`


@lru_cache
def stopped_run(kind: str) -> StoppedRun:
    """Makes the two runs of a kind."""
    parent = Path(mkdtemp())
    is_finished = kind.startswith("finished")
    rounds = 9 if is_finished else 2
    options = {**TINY, "train_examples": 60, "rounds": 3, "batch_size": 8, "backbone": "cnn-small"}
    options |= STOPPED_RUNS[kind]
    del options["dataset"]  # each method has its own built-in one
    for name, seed in (("run", 0), ("other", 1)):
        with suppress(Stop):
            fedcli.run(**options, seed=seed, out=parent / name, progress=StopAfter(rounds))
        if is_finished:
            quality.add_quality(parent / name)
    outcome = outcome_of(shutil.copytree(parent / "run", parent / "whole"))
    return StoppedRun(parent / "run", parent / "other", outcome)


def outcome_of(folder: Path) -> str:
    """What a run comes to: its parameters once it is resumed, or, where it has features, these and its models."""
    if not (folder / quality.OF_THE_MODEL.file).is_file():
        return resume.resume(folder).record["summary"]["params_sha256"]
    run = fedcli.load(folder)
    values = [*quality.read_outputs(folder, run.record).items()]
    for name in ROUNDS:
        values += run.model(round=name).state_dict().items()
    return params_hash((name, torch.as_tensor(value)) for name, value in values)


def damage_one_file(folder: Path, other: Path, draw: random.Random) -> str:
    """Flips a bit of a file of a run, cuts it, or puts the other run's in its place; says what it did."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    how = draw.choice(("flip", "cut", "exchange"))
    content = bytearray(file.read_bytes())
    if how == "exchange":
        counterpart = other / file.relative_to(folder)
        # Where the other run has no such file, any of its files.
        candidates = [counterpart, *sorted(counterpart.parent.iterdir())]
        content = next(path for path in candidates if path.is_file()).read_bytes()
    elif how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    file.write_bytes(content)
    return f"{how} {file.name}"


def damage(number: int) -> str:
    """A run with a damaged file is refused in a line, or comes to the same end."""
    kind = list(STOPPED_RUNS)[number % len(STOPPED_RUNS)]
    source = stopped_run(kind)
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(source.folder, Path(parent, "run"))
        description = damage_one_file(folder, source.other_folder, random.Random(number))
        try:
            outcome = outcome_of(folder)
        except UserError as error:
            return f"{kind}, {description}: a refusal of several lines" if "\n" in str(error) else ""
    if description in ("exchange record.json", "exchange checkpoint.safetensors"):
        return f"{kind}, {description}: not refused"
    return "" if outcome == source.outcome else f"{kind}, {description}: other bits"


# Command lines

WILD = (
    "", " ", "-", "--", "0", "-1", "1_0", "٣", "1e999", "-1e-999", "nan", "inf", "1e300", "9" * 24, "9" * 5000,
    "x" * 300, "a/" * 3000, "/etc/passwd", "/dev/null", ".", "..", "/", "\udcff", "\x1b[31m", "$\\frac$", "raises.py:x",
    "./exits.py:x", "empty.py:METHOD", "./none.py:f", "true", "None", "auto", "iid", "dirichlet:0.5", "classes:20",
    "dominant:1:share=1e-999999", "dominant:1:share=4/0", "domains+iid", "0.5", "2", "1,0", "0,1", "lr=0.1,0.1", "csv",
    "best", "run", "fedfm:III", "digits", "fedavg", "run/record.json", "curves", "tsne",
)  # fmt: skip
USER_FILES = {
    "raises.py": "raise RuntimeError('two\\nlines')\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "late.py": "import sys\nfrom dataclasses import replace\nfrom fedcli.papers.baselines import fedavg\n"
    "METHOD = replace(fedavg.METHOD, name='late', run_round=lambda *given: sys.exit(0))\n",
    "syntax.py": "def\n",
    "empty.py": "",
}
COMMANDS = {
    "table": ("--format", "--metric", "--out", "--only", "--seeds", "--rounds", "--jobs", "--runs"),
    "plot": ("--kind", "--out", "--x", "--method"),
    "quality": ("--client", "--clients", "--method"),
    "resume": ("--method", "--changed-method"),
    "verify": ("--out", "--device", "--method"),
    "show": ("--help",),
    "data show": ("--partition", "--num-clients", "--partition-seed", "--out"),
    "data import": ("--help",),
    "check fedavg --law 5": ("--law", "--device"),
}
SWITCHES = ("--clients", "--changed-method", "--help")  # flags without a value


def command_line(draw: random.Random) -> list[str]:
    """A line in the grammar of the commands, with values that are right, at an edge, or mad."""
    return line_of_other_command(draw) if draw.random() < 0.4 else line_of_run(draw)


def line_of_other_command(draw: random.Random) -> list[str]:
    """A line of a command that trains nothing: up to two arguments and up to two options."""
    command = draw.choice(list(COMMANDS))
    flags = COMMANDS[command]
    line = command.split()
    line += [draw.choice(WILD) for _ in range(draw.randint(0, 2))]
    for flag in draw.sample(flags, draw.randint(0, min(2, len(flags)))):
        line.append(flag)
        if flag not in SWITCHES:
            line.append(draw.choice(WILD))
    if command == "table" and "fedfm:III" in line:
        line.append("--dry-run")
    return line


def line_of_run(draw: random.Random) -> list[str]:
    """A line of `run` or `tune` with a method, which may be none, and up to four options."""
    user_methods = [f"./{file}" for file in USER_FILES]
    name = draw.choice([*registry.methods(), *user_methods, *WILD])
    method = registry.methods().get(name, registry.find_method("fedavg"))
    fields = recorded_fields(method)
    command = draw.choice(("run", "run", "run", "tune"))
    line = [command, name, *SMALL, "--rounds", "1"]
    for option in draw.sample(sorted(fields), draw.randint(0, 4)):
        words = option.replace("_", "-")
        choices = facts_of(fields[option]).choices
        value = draw.choice([*choices, *WILD])
        is_first_form = draw.random() < 0.5
        if fields[option].type is bool:
            line.append(f"--{words}" if is_first_form else f"--no-{words}")
        elif is_first_form:
            line.append(f"--{words}={value}")
        else:
            line += [f"--{words}", value]
    return line


def fuzz_command_line(number: int) -> str:
    """A command line ends well, or in one line that says what is wrong."""
    line = command_line(random.Random(number))
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        for name, text in USER_FILES.items():
            (folder / name).write_text(text)
        shutil.copytree(stopped_run(FEATURES).folder, folder / "run")
        end = run_command(folder, *line, seconds=30)
    return f"{[text[:60] for text in line]}: {end.fault[:200]}" if end.fault else ""


# Records

TEXTS = (
    "<script>alert(1)</script>", "two\nlines", "=HYPERLINK(1)", "a|b", "`x`", "\u202eabc", "\ud800", "x" * 20_000,
    "\x00", "%s{}", "[red]", "../../etc", "[a](b)", "\\input{x}", *WILD,
)  # fmt: skip
READERS = (
    "table r", "table r --format csv --metric best,domain,at:1/2,total-floats", "table r --format latex", "plot r",
    "plot r --x floats", "plot r --x seconds", "plot r --kind confusion", "resume r", "verify r", "quality r",
    "export r", "report r",
)  # fmt: skip


def text_places(value: Any) -> list[tuple[Any, Any]]:
    """Every dictionary or list inside a value, with each of its keys that has a text."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, part in entries:
        if isinstance(part, str):
            found.append((value, key))
        elif isinstance(part, dict | list):
            found += text_places(part)
    return found


def put_wild_text(number: int) -> str:
    """A record with a wild text in it, which its digest vouches for, is read or refused in a line."""
    draw = random.Random(number)
    command = READERS[number % len(READERS)]
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(stopped_run(FEATURES).folder, Path(parent, "r"))
        record = read_record(folder)
        container, key = draw.choice(text_places(record))
        container[key] = draw.choice(TEXTS)
        write_record(folder, record)
        end = run_command(Path(parent), *command.split())
    return f"{key!r}, {command}: {end.fault[:200]}" if end.fault else ""


# Mutations of real records

VALUES = (
    None, True, False, 0, 1, -1, -0.5, 1.5, 1e300, 10**30, float("nan"), float("inf"), "", "text", "\ud800", "\0", "1",
    [], {}, [0], {"a": 0}, [[0]], "x" * 300,
)  # fmt: skip
NAMES = ("", "another", "-1", "99", "٣", "9" * 5000, "x" * 300)
NOT_READ = {"reduced", "public"}  # parts of older records


@lru_cache
def real_records() -> list[Path]:
    """The committed records, after one with features and models."""
    return [stopped_run(FEATURES).folder / RECORD, *sorted(COMMITTED.rglob(RECORD))]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to all parts of a value; of a list with more than four entries the first and the last alone."""
    keys: list = []
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))] if len(value) <= 4 else [0, len(value) - 1]
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def part_at(parts: Any, path: tuple) -> Any:
    """The part of nested lists and dicts at a path."""
    for key in path:
        parts = parts[key]
    return parts


class Mutation(NamedTuple):
    """A real record of which a part is another now."""

    record: dict[str, Any]
    path: tuple  # to the part
    description: str  # what the part is now
    must_refuse: bool


def mutation(number: int) -> Mutation:
    """Removes a part of a real record, gives it another name or another value."""
    draw = random.Random(number)
    with_features, *committed = real_records()
    file = draw.choice([with_features] * 9 + committed)
    record = json.loads(file.read_text())
    record.pop("digest", None)

    path = draw.choice(sorted({*places(record)}, key=str))
    *parents, key = path
    container = part_at(record, parents)
    chance = draw.random()
    if chance < 0.15:
        del container[key]
        return Mutation(record, path, "removed", must_refuse=False)
    if chance < 0.3 and isinstance(key, str):
        name = draw.choice(NAMES)
        container[name] = container.pop(key)
        return Mutation(record, path, f"now '{name:.40}'", must_refuse=False)
    old = container[key]
    new = draw.choice(VALUES)
    container[key] = new
    return Mutation(record, path, f"{new!r:.40}", must_refuse=_is_wrong(path, old, new))


def _is_wrong(path: tuple, old: Any, new: Any) -> bool:
    """Whether a value is of another type than the old one, or no number or text at all, or a count below 0."""
    section = path[0]
    if section in NOT_READ:
        return False
    if new is None or old is None:  # for a part that a run has not
        return False
    if isinstance(new, float) and not math.isfinite(new):
        return True
    if isinstance(new, str) and isinstance(old, str):
        return new in ("\ud800", "\0")
    are_numbers = type(old) in (int, float) and type(new) in (int, float)
    if section == "config" and not are_numbers and type(old) is not type(new):
        return type(new) in (list, dict) or path[-1] in FIRST_OPTIONS
    if are_numbers and type(old) is int and section != "config" and "terms" not in path:
        return type(new) is float or new < 0
    return not are_numbers and type(old) is not type(new)


def mutate_record(number: int) -> str:
    """A real record with another part is refused in a line where it is read, or taken by all that reads records."""
    record, path, description, must_refuse = mutation(number)
    dotted_path = ".".join(map(str, path))
    description = f"{dotted_path} {description}"
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        if "quality" in record:
            shutil.copytree(stopped_run(FEATURES).folder, folder)
        folder.mkdir(exist_ok=True)
        text = json.dumps({**record, "digest": digest_of(record)})
        (folder / RECORD).write_text(text)
        try:
            record_read = read_record(folder)
        except UserError as error:
            return f"{description}: a refusal of several lines" if "\n" in str(error) else ""
        except Exception as error:
            return f"{description}: {type(error).__name__}: {error}"
        if must_refuse:
            return f"{description}: not refused"
        return _fault_of_readers(folder, record_read, description)


def _fault_of_readers(folder: Path, record: dict[str, Any], description: str) -> str:
    """What goes wrong in anything that reads a record; empty if nothing does."""
    records = find_records([folder])

    def render_tables() -> None:
        for sheet in tables.sheets(records):
            for form in ("markdown", "latex", "csv"):
                render(sheet, form)

    def read_clients_and_rounds() -> None:
        of_all(records, clients_of)
        of_all(records, rounds_of)

    readers: dict[str, Callable[[], object]] = {
        "table": render_tables,
        "clients": read_clients_and_rounds,
        "plot": lambda: saving.write_figure(folder / "curves.svg", line_charts.learning_curves, records),
        "report": lambda: report.report(records),
        "claims": lambda: claims.answers(registry.claims()[number_of(record) :: 30], [folder]),
        "export": lambda: export(fedcli.load(folder), "safetensors", out=folder / "model"),
    }
    for name, reader in readers.items():
        try:
            reader()
        except UserError as error:
            if "\n" in str(error):
                return f"{description}, {name}: a refusal of several lines"
        except Exception as error:
            return f"{description}, {name}: {type(error).__name__}: {error}"
    return ""


def number_of(record: dict[str, Any]) -> int:
    """A number from 0 to 29 that follows from a record."""
    return int(digest_of(record)[:4], 16) % 30


# Checkpoints with another content, for which their digests vouch

CRAFTED = ("client state", "global model")  # kinds of stopped runs
FINISHED_RUNS: dict[str, dict[str, Any]] = {
    "finished, best models kept": {"method": "fedfm", "rounds": 5, "validation": 0.2, "lr": 0.1, "seed": 2},
    "finished, own models": {"method": "local", "rounds": 2, "validation": 0},
    "finished, own models and a global one": {"method": "ditto", "rounds": 2, "validation": 0},
    "finished, prototypes": {"method": "fedproto", "rounds": 2, "protocol": "fedsa:digits"},
}
WITH_MODELS = tuple(FINISHED_RUNS)


class Content(NamedTuple):
    """What a file of a state holds."""

    parts: dict[str, Any]  # `tree` and `about`, see `fedcli.core.tree_files`
    tensors: dict[str, torch.Tensor]


def content_of(file: Path) -> Content:
    """Reads a file of a state."""
    tree, facts, tensors = read_verified(file)
    return Content({"tree": tree, "about": facts}, tensors)


def sign(file: Path, content: Content) -> str:
    """Writes a file of a state, whatever it holds, with its right SHA-256, which is returned."""
    text = json.dumps({"sha256": ZEROS.decode(), **content.parts})
    tensors = {name: tensor.contiguous() for name, tensor in content.tensors.items()}
    data = safetensors.save(tensors, {"fedcli": text})
    digest = hashlib.sha256(data).hexdigest()
    file.write_bytes(data.replace(ZEROS, digest.encode(), 1))
    return digest


TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda tensor: None,
    "shorter": lambda tensor: tensor.flatten()[1:],
    "of one more axis": lambda tensor: tensor[None],
    "of another type": lambda tensor: tensor.to(torch.float64),
    "of integers": lambda tensor: tensor.to(torch.int32),
}


class FinishedRun(NamedTuple):
    """A finished run of which models are kept."""

    folder: Path
    models: str  # see `models_hash`


@lru_cache
def finished_run(kind: str) -> FinishedRun:
    """Makes the run of a kind."""
    folder = Path(mkdtemp(), "run")
    options = {**TINY, "batch_size": 8, "train_examples": 60, "protocol": "fedfm:digits", **FINISHED_RUNS[kind]}
    fedcli.run(**options, out=folder)
    return FinishedRun(folder, models_hash(folder))


def models_hash(folder: Path) -> str:
    """Stands for the models of a finished run."""
    run = fedcli.load(folder)
    method = registry.find_method(run.record["method"])
    owners = []
    if method.personal is None or method.shared is not None:
        owners.append(None)  # the server
    if method.personal is not None:
        owners.append(0)
    by_prototypes = method.prototypes is not None
    values: list[tuple[str, torch.Tensor]] = []
    for owner in owners:
        for name in ROUNDS:
            values += run.model(owner, round=name, prototypes=by_prototypes).state_dict().items()
    return params_hash(values)


def crafted_from(kind: str) -> Path:
    """The folder of the run of a kind whose files are crafted."""
    return finished_run(kind).folder if kind in WITH_MODELS else stopped_run(kind).folder


class Change(NamedTuple):
    """A change in a file of a run."""

    file: str
    path: tuple | str  # to a part, or the name of a tensor
    how: str


@lru_cache
def possible_changes(kind: str) -> list[Change]:
    """What may be changed in a run's checkpoint, in its best models, and in the last client state that it names."""
    folder = crafted_from(kind)
    files = [CHECKPOINT]
    if (folder / SELECTED).is_file():
        files.append(SELECTED)
    client_states = sorted(folder.glob("states/000000-*"))
    if client_states:
        files.append(f"states/{client_states[-1].name}")

    changes: list[Change] = []
    for file in files:
        content = content_of(folder / file)
        for path in places(content.parts):
            changes.append(Change(file, path, "another"))
            changes.append(Change(file, path, "nested"))
            part = part_at(content.parts, path)
            if type(part) is int:
                changes.append(Change(file, path, "one more"))
            if type(part) is list:
                changes.append(Change(file, path, "emptied"))
            if isinstance(path[-1], str) or path[0] == "tree":
                changes.append(Change(file, path, "removed"))
        for name in content.tensors:
            changes += [Change(file, name, how) for how in TENSOR_CHANGES]
    return changes


class RestoredRun(NamedTuple):
    """A stopped run that can go on."""

    restored: Any  # what a checkpoint of it is read with
    state: str  # see `checkpoint_hash`


@lru_cache
def restored_run(kind: str) -> RestoredRun:
    """Restores the stopped run of a kind."""
    folder = stopped_run(kind).folder
    restored = resume.restore(read_record(folder), ())
    return RestoredRun(restored, checkpoint_hash(read_checkpoint(folder, *restored)))


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Stands for the state and the number of rounds from which a run goes on."""
    kept_states = stored(checkpoint.state)
    clients = {name: dict(kept) for name, kept in kept_states.items()}
    sizes = [kept.nbytes for kept in kept_states.values()]  # by which memory is shared out
    state = checkpoint.state._replace(**clients)
    structure, tensors = to_names([state, sizes, len(checkpoint.progress["rounds"])])
    return json.dumps(structure) + params_hash(sorted(tensors.items()))


def change_tensor(content: Content, name: str, how: str) -> str:
    """Changes a tensor of what a file holds; says how."""
    tensor = content.tensors.pop(name)
    changed = TENSOR_CHANGES[how](tensor)
    if changed is not None:
        content.tensors[name] = changed
    return how


def change_part(content: Content, path: tuple, how: str, draw: random.Random) -> str:
    """Changes a part of what a file holds; says how, or what stands there now."""
    *parents, key = path
    container = part_at(content.parts, parents)
    if how == "one more":
        container[key] += 1
        return how
    if how == "removed":
        del container[key]
        return how
    if how == "emptied":
        container[key] = []
        return how
    container[key] = draw.choice(VALUES) if how == "another" else [container[key]]
    return f"{container[key]!r:.40}"


def outcome_of_crafted(kind: str, folder: Path) -> str:
    """What a folder with a crafted file comes to: its models, or the state from which it goes on."""
    if kind in WITH_MODELS:
        return models_hash(folder)
    return checkpoint_hash(read_checkpoint(folder, *restored_run(kind).restored))


def craft(kind: str, number: int) -> str:
    """A checkpoint of another content is refused in a line where it is read, or is the same to the run."""
    changes = possible_changes(kind)
    file, path, how = changes[number % len(changes)]
    expected = finished_run(kind).models if kind in WITH_MODELS else restored_run(kind).state
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(crafted_from(kind), Path(parent, "run"))
        content = content_of(folder / file)
        if isinstance(path, str):
            changed = change_tensor(content, path, how)
        else:
            changed = change_part(content, path, how, random.Random(number))
        description = f"{kind}, {file}, {path} {changed}"

        digest = sign(folder / file, content)
        if file not in (CHECKPOINT, SELECTED):
            checkpoint = content_of(folder / CHECKPOINT)
            text = json.dumps(checkpoint.parts).replace(digest_in(kind, file), digest)
            sign(folder / CHECKPOINT, Content(json.loads(text), checkpoint.tensors))

        try:
            outcome = outcome_of_crafted(kind, folder)
        except UserError as error:
            message = str(error)
            is_clear = "\n" not in message and "safetensors" in message and ";" in message
            return "" if is_clear else f"{description}: {message}"
        except Exception as error:
            return f"{description}: {type(error).__name__}: {error}"
    return "" if outcome == expected else f"{description}: taken for another state"


def digest_in(kind: str, file: str) -> str:
    """The SHA-256 by which a run's checkpoint names the file of a client's state."""
    match = DIGEST.search((crafted_from(kind) / file).read_bytes())
    assert match is not None
    return match[1].decode()


def craft_of_any_kind(number: int) -> str:
    """A crafted file of one kind of run or another."""
    kinds = CRAFTED + WITH_MODELS
    return craft(kinds[number % len(kinds)], number // len(kinds))


# Code in a file that a record, tuned options or a checkpoint names

COMMANDS_THAT_READ = (
    "table r", "table r --format csv --metric best,domain", "table r --per round", "table r --per client", "plot r",
    "plot r --kind confusion", "plot r --kind tsne", "plot r --kind correlation", "report r", "resume r", "verify r",
    "quality r", "quality r --clients", "export r", "export r --format safetensors", "run --from r",
    "run fedavg --from r", "run fedavg --tuned tuned.json", "run fedavg --out r --continue", "claims fedsa --runs r",
    "table fedfm:III --only FedAvg --runs r --dry-run",
)  # fmt: skip
# Of a part in a file, `{0}`; what a reader of paths and an opener of files might take differently.
SPELLINGS = (
    "{0}", "{0}:x", "{0}:,x", "{0}:METHOD", "{0}:tiny,cnn-small", "cnn-small,{0}:tiny", "{0}:", "{0}::", "{0}:x:y",
    "{0},{0}:x", " {0}:x", "{0}:x ", "file:{0}", "file:{0}:x", "domains+{0}:x", "{0}:x,", ",{0}:x", "{0}\n:x",
    "{0}:x\n", "./evil.py:x", "evil.py", "../{1}/evil.py:tiny", "iid,{0}:x", "{0}/:x", "~/evil.py:x",
    "ray:{0}:x", "tensorboard,{0}:x",
)  # fmt: skip
EVIL = "open('imported', 'w').close()\ndef x(*given): open('called', 'w').close()\ntiny = METHOD = x\n"
# Parts of a record that a run could take a method or a part from; also those of all others are tried.
NAMING = (
    ("method",), ("method_source",), ("protocol",), ("dataset",), ("config", "protocol"), ("config", "dataset"),
    ("config", "public_dataset"), ("config", "partition"), ("config", "backbone"), ("config", "post"),
    ("partition", "flag"), ("model", "backbone"),
)  # fmt: skip


def spelt(number: int, folder: Path) -> str:
    """A spelling of a part of the file `evil.py` in a folder."""
    return SPELLINGS[number % len(SPELLINGS)].format(folder / "evil.py", folder.name)


def put_into(folder: Path, path: tuple, text: str, is_stopped: bool, files: dict[str, str] | None = None) -> None:
    """Puts a text into a part of a run's record, which a digest vouches for, as if all options had been typed."""
    record = read_record(folder)
    record["user_files"] = files or {}
    record["origin"] = dict.fromkeys(record["config"], "command line")
    if is_stopped:
        record["status"] = "interrupted"
    *parents, key = path
    part_at(record, parents)[key] = text
    if path in (("protocol",), ("dataset",)):
        record["config"][key] = text
    (folder / RECORD).write_text(json.dumps({**record, "digest": digest_of(record)}))


def name_file_of_code(number: int) -> str:
    """A command that reads a record in which some part names a file of code does not import it."""
    draw = random.Random(number)
    command = COMMANDS_THAT_READ[number % len(COMMANDS_THAT_READ)]
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        shutil.copytree(stopped_run(FEATURES).folder, folder / "r")
        evil = folder / "evil.py"
        evil.write_text(EVIL)

        text = spelt(draw.randrange(len(SPELLINGS)), folder)
        path = draw.choice(NAMING) if draw.random() < 0.7 else draw.choice([*places(read_record(folder / "r"))])
        recorded_files = {str(evil): file_hash(evil)} if draw.random() < 0.5 else {}
        put_into(folder / "r", path, text, draw.random() < 0.5, recorded_files)
        option = draw.choice(("backbone", "partition", "dataset", "post", "protocol", "lr"))
        tuned = {"method": "fedavg", "seed": "0", "options": {option: text}}
        (folder / "tuned.json").write_text(json.dumps(tuned))

        end = run_command(folder, *command.split(), seconds=120)
        is_imported = (folder / "imported").exists()
    dotted_path = ".".join(map(str, path))
    description = f"{dotted_path}: {text!r}, {command}"
    if is_imported:
        return f"{description}: imported"
    return f"{description}: {end.fault[:200]}" if end.fault else ""


# Folders that are moved, removed or replaced while a run writes in them

LOSSES = ("move", "remove", "unlock", "replace", "replace by a copy", "make a link")


class LosesFolder(Listener):
    """Loses the folder of its run after so many batches."""

    def __init__(self, batches: int, how: str, folder: Path, other: Path):
        self.left = batches
        self.how = how
        self.folder = folder
        self.other = other

    def samples(self, count: int) -> None:
        self.left -= 1
        if self.left == 0:
            self.lose()

    def lose(self) -> None:
        elsewhere = self.folder.with_name("elsewhere")
        if self.how == "unlock":
            (self.folder / ".lock").unlink(missing_ok=True)
        elif self.how == "remove":
            shutil.rmtree(self.folder)
        else:
            self.folder.rename(elsewhere)
        if self.how == "make a link":
            self.folder.symlink_to(self.other)
        elif self.how.startswith("replace"):
            shutil.copytree(self.other, self.folder)


def lose_folder(number: int) -> str:
    """A run that loses its folder ends in a line, and changes nothing in what stands there now."""
    draw = random.Random(number)
    how = LOSSES[number % len(LOSSES)]
    method = registry.find_method(KILLED[number // len(LOSSES) % len(KILLED)])
    description = f"{method.name}, {how}"
    options = options_of_small_run(method)
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        other = Path(parent, "other")
        shutil.copytree(stopped_run("client state").folder, other)
        (other / ".lock").touch()  # of a process that goes on with it
        before = contents(other)

        listener = LosesFolder(draw.randint(1, 4), how, folder, other)
        end = fork(lambda: fedcli.run(method.name, out=folder, progress=listener, **options))

        if end.code == 0 or "FolderLost" not in end.errors:
            return f"{description}: {end.code}, {end.errors.strip().splitlines()[-1:]}"
        if contents(other) != before or (how.startswith("replace") and contents(folder) != before):
            return f"{description}: another run's files are other ones"
        if how not in ("remove", "unlock"):
            moved = folder.with_name("elsewhere")
            (moved / ".lock").unlink(missing_ok=True)
            if (moved / RECORD).is_file() and fedcli.load(moved).record["status"] != "running":
                return f"{description}: the moved record is another one"
    return ""


# Networks

NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, channels, size, classes):
        super().__init__()
        self.first = nn.Linear(channels * size * size, 12)
        self.last = nn.Linear(12, classes)
        self.register_buffer("kept", torch.ones(12), persistent=PERSISTENT)
        self.register_buffer("other", torch.ones(12), persistent=True)
        MORE

    def forward(self, x):
        x = self.first(x.flatten(1))
        if self.training:
            CHANGE
        x = torch.tanh(x / self.kept) + 0.1 * self.other
        return BEHIND
"""
CHANGES = (
    "self.kept.mul_(1.5)",
    "self.kept.copy_(self.kept + 1)",
    "self.kept = self.kept * 1.5",
    "self.kept.data = x.data[0]",
    "self.kept, self.other = self.other, self.kept",
    "self._buffers['kept'] = self.other.clone()",
    "pass",
    "self.first.bias.data.mul_(0.9)",
    "with torch.no_grad(): self.other.lerp_(x.mean(0), 0.1)",
    "self._buffers['kept'], self._buffers['other'] = self.other.mul_(1.5), self.kept",
)
MORES = (
    "pass",
    "pass",
    "self.double()",
    "self.other = self.kept",
    "self.first.weight.register_hook(lambda g: 0 * g)",
    "self.t = nn.Parameter(torch.zeros(1))",
    "self.register_buffer('key', torch.tensor(3))",
    "self.first.register_forward_hook(lambda layer, given, output: output + 1)",
    "self.first.requires_grad_(False)",
)
BEHINDS = ("self.last(x)", "self.last(x)", "self.last(F.dropout(x, 0.1, self.training))", "self.last(x).clamp(-99, 99)")


def swap_buffers(number: int) -> str:
    """A network whose buffers change or change places is refused in a line, or its loaded models are as recorded."""
    draw = random.Random(number)
    parts = {
        "PERSISTENT": str(draw.random() < 0.5),
        "MORE": draw.choice(MORES),
        "CHANGE": draw.choice(CHANGES),
        "BEHIND": draw.choice(BEHINDS),
    }
    text = NETWORK
    for name, part in parts.items():
        text = text.replace(name, part)
    with TemporaryDirectory() as parent:
        file = Path(parent, "net.py")
        file.write_text(text)
        options = {**TINY, "rounds": 1, "backbone": f"{file}:Net", "clients_per_chunk": draw.choice(("1", "2"))}
        try:
            run = fedcli.run("fedavg", out=Path(parent, "run"), **options)
        except UserError as error:
            is_clean = "\n" not in str(error) and not Path(parent, "run").exists()
            return "" if is_clean else f"{parts}: refused late or in several lines: {error}"
        data = datasets.load("digits")
        model = fedcli.load(run.path, method=file).model()
        hits = model(data.x_test / 255).argmax(1) == data.y_test
        accuracy = hits.double().mean().item()
        recorded = run.record["summary"]["selected"]
        return "" if accuracy == recorded else f"{parts}: {accuracy} when it is loaded, recorded {recorded}"


# A CUDA device that is made up

WAYS = ("branches:4", "branches:3")  # of training the four clients of a round


@on_made_up_device
def train_on_made_up_device(number: int) -> str:
    """Four rounds of a method in graphs of steps have the bits of the steps on the CPU, and are captured early."""
    draw = random.Random(number)
    methods = list(registry.methods())
    name = methods[number % len(methods)]
    way = WAYS[number // len(methods)]
    sizes = [draw.randint(1, 9) for _ in range(4)]
    options = {
        "clients_per_chunk": way,
        "parts": laws.toy_parts(sizes),
        "local_epochs": draw.randint(1, 2),
        "momentum": draw.choice((0.0, 0.9)),
        "lr_decay": draw.choice((1.0, 0.5)),
        "backbone": laws.NORMED,
    }
    description = f"{name}, {way}, clients of {sizes}"
    method = quick(registry.find_method(name))
    with early_captures():
        run = on_device(method, rounds=4, **options)
        distance = laws.distance(run.state, on_cpu(method, rounds=4, **options))
    if run.fed.engine.notes or distance:
        return f"{description}: {distance}, {run.fed.engine.notes}"
    if way == "branches:4" and run.rounds[-1]["captures"]:
        return f"{description}: a capture in the fourth round"
    return "" if run.device.replays else f"{description}: no replay"


def replay(number: int) -> str:
    """A method's steps are the same on the made-up device, in a process that has it."""
    return train_on_made_up_device(number=number)


def faults_of(trial: Callable[[int], str], count: int) -> list[str]:
    """What goes wrong in the first so many trials of a kind."""
    outcomes = [trial(number) for number in range(count)]
    return [fault for fault in outcomes if fault]


class Trial(NamedTuple):
    """A kind of misfortune, and how often it is tried in the long round."""

    name: str
    action: Callable[[int], str]
    times: int


TRIALS = (
    Trial("a run killed four times at random moments, over 12 methods", kill_repeatedly, 84),
    Trial("flipped bits, cut and exchanged files of seven kinds of runs", damage, 500),
    Trial("fuzzed command lines", fuzz_command_line, 1000),
    Trial("hostile records", put_wild_text, 260),
    Trial("mutated parts of real records", mutate_record, 5000),
    Trial("mutated checkpoints and client states with right digests", craft_of_any_kind, 2400),
    Trial(
        "records and tuned options that name a file of code, over all commands that read them", name_file_of_code, 840
    ),
    Trial("folders moved, removed or replaced while a run writes in them", lose_folder, 72),
    Trial("networks whose buffers change, or are swapped", swap_buffers, 300),
    Trial("clients in branches on a made-up CUDA device, of every method", replay, len(WAYS) * len(registry.methods())),
)


def write_table(table: str) -> None:
    """Puts the table between the marks of its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    PAGE.write_text(f"{before}{BEGIN_MARK}\n\n{table}\n{END_MARK}{after}")


def main() -> int:
    shares = [float(text) for text in sys.argv[1:] if text != "--write"]
    share = shares[0] if shares else 1.0
    import_commands()
    table = "| Trial | Tried | Survived |\n| --- | ---: | ---: |\n"
    has_failed = False
    with TemporaryDirectory() as cache, ProcessPoolExecutor(2, get_context("fork")) as pool:
        os.environ["FEDCLI_DATA"] = cache  # before the pool forks
        for trial in TRIALS:
            count = max(1, round(share * trial.times))
            # The made-up device has a process of its own, for which a worker of the pool would wait at its end.
            map_trial = map if trial.action is replay else pool.map
            faults = [fault for fault in map_trial(trial.action, range(count)) if fault]
            has_failed |= bool(faults)
            table += f"| {trial.name} | {count:,} | {count - len(faults):,} |\n"
            print(f"{trial.name}: {count}", *map(ascii, faults), sep="\n  ", flush=True)
    print(f"\n{table}")
    if "--write" in sys.argv:
        write_table(table)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
