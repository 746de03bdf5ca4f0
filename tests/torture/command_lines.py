"""Command lines with values that are right, at an edge, or mad."""

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcli import registry
from fedcli.declarations import spec_of
from fedcli.runs.options import flags_of, recorded_fields
from tests.run_options import THREE_ROUNDS
from tests.torture.processes import run_command_in_fork
from tests.torture.source_runs import run_with_features

WILD_VALUES = (
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


def draw_command_line(draw: random.Random) -> list[str]:
    """Draws a line in the grammar of the commands, as a list of its words."""
    if draw.random() < 0.4:
        return draw_other_line(draw)
    return draw_run_line(draw)


def draw_other_line(draw: random.Random) -> list[str]:
    """Draws a line of a command that trains nothing, with up to two arguments and up to two options."""
    command = draw.choice(list(COMMANDS))
    flags = COMMANDS[command]
    line = command.split()
    line += [draw.choice(WILD_VALUES) for _ in range(draw.randint(0, 2))]
    for flag in draw.sample(flags, draw.randint(0, min(2, len(flags)))):
        line.append(flag)
        if flag not in SWITCHES:
            line.append(draw.choice(WILD_VALUES))
    if command == "table" and "fedfm:III" in line:
        line.append("--dry-run")
    return line


def draw_run_line(draw: random.Random) -> list[str]:
    """Draws a line of `run` or `tune` with up to four options; the name of its method may be that of none."""
    user_methods = [f"./{file}" for file in USER_FILES]
    name = draw.choice([*registry.methods(), *user_methods, *WILD_VALUES])
    method = registry.methods().get(name, registry.find_method("fedavg"))
    fields = recorded_fields(method)
    command = draw.choice(("run", "run", "run", "tune"))
    line = [command, name, *flags_of(THREE_ROUNDS), "--rounds", "1"]
    for option in draw.sample(sorted(fields), draw.randint(0, 4)):
        words = option.replace("_", "-")
        choices = spec_of(fields[option]).choices
        value = draw.choice([*choices, *WILD_VALUES])
        is_first_form = draw.random() < 0.5
        if fields[option].type is bool:
            line.append(f"--{words}" if is_first_form else f"--no-{words}")
        elif is_first_form:
            line.append(f"--{words}={value}")
        else:
            line += [f"--{words}", value]
    return line


def fuzz_command_line(number: int) -> str | None:
    """A command line ends well, or in one line that says what is wrong."""
    line = draw_command_line(random.Random(number))
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        for name, text in USER_FILES.items():
            (folder / name).write_text(text)
        shutil.copytree(run_with_features().folder, folder / "run")
        end = run_command_in_fork(folder, *line, seconds=30)
    if end.fault is None:
        return None
    shortened = [text[:60] for text in line]
    return f"{shortened}: {end.fault}"
