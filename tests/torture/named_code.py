"""Files of code that a record, tuned options or a checkpoint names, and no command may import."""

import json
import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcli.runs.record import read_record
from fedcli.userfiles import file_hash
from tests.torture.nested_parts import entry_at, paths_in
from tests.torture.processes import run_command_in_fork
from tests.torture.signed_files import sign_record
from tests.torture.source_runs import run_with_features

COMMANDS_THAT_READ = (
    "table r", "table r --format csv --metric best,domain", "table r --per round", "table r --per client", "plot r",
    "plot r --kind confusion", "plot r --kind tsne", "plot r --kind correlation", "report r", "resume r", "verify r",
    "quality r", "quality r --clients", "export r", "export r --format safetensors", "run --from r",
    "run fedavg --from r", "run fedavg --tuned tuned.json", "run fedavg --out r --continue", "claims fedsa --runs r",
    "table fedfm:III --only FedAvg --runs r --dry-run",
)  # fmt: skip
# How a part of a file, `{0}` in a folder `{1}`, may be written; a reader of paths and an opener of files might differ.
SPELLINGS = (
    "{0}", "{0}:x", "{0}:,x", "{0}:METHOD", "{0}:tiny,cnn-small", "cnn-small,{0}:tiny", "{0}:", "{0}::", "{0}:x:y",
    "{0},{0}:x", " {0}:x", "{0}:x ", "file:{0}", "file:{0}:x", "domains+{0}:x", "{0}:x,", ",{0}:x", "{0}\n:x",
    "{0}:x\n", "./evil.py:x", "evil.py", "../{1}/evil.py:tiny", "iid,{0}:x", "{0}/:x", "~/evil.py:x",
    "ray:{0}:x", "tensorboard,{0}:x",
)  # fmt: skip
EVIL_SOURCE = "open('imported', 'w').close()\ndef x(*given): open('called', 'w').close()\ntiny = METHOD = x\n"
# Parts of a record that a run could take a method or a part from; also those of all others are tried.
NAMING_PARTS = (
    ("method",), ("method_source",), ("protocol",), ("dataset",), ("config", "protocol"), ("config", "dataset"),
    ("config", "public_dataset"), ("config", "partition"), ("config", "backbone"), ("config", "post"),
    ("partition", "flag"), ("model", "backbone"),
)  # fmt: skip


def forge_record(folder: Path, path: tuple, text: str, *, is_stopped: bool, user_files: dict[str, str]) -> None:
    """Puts a text into a part of a run's record, for which its digest vouches, as if all options had been typed."""
    record = read_record(folder)
    record["user_files"] = user_files
    record["origin"] = dict.fromkeys(record["config"], "command line")
    if is_stopped:
        record["status"] = "interrupted"
    container, key = entry_at(record, path)
    container[key] = text
    if path in (("protocol",), ("dataset",)):
        record["config"][key] = text
    sign_record(folder, record)


def name_file_of_code(number: int) -> str | None:
    """A command that reads a record in which some part names a file of code does not import it."""
    draw = random.Random(number)
    command = COMMANDS_THAT_READ[number % len(COMMANDS_THAT_READ)]
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        shutil.copytree(run_with_features().folder, folder / "r")
        evil = folder / "evil.py"
        evil.write_text(EVIL_SOURCE)

        # These draws stay in their order, so that a trial stays what its number says.
        text = draw.choice(SPELLINGS).format(evil, folder.name)
        is_naming_part = draw.random() < 0.7
        paths = NAMING_PARTS if is_naming_part else tuple(paths_in(read_record(folder / "r")))
        path = draw.choice(paths)
        is_file_recorded = draw.random() < 0.5
        is_stopped = draw.random() < 0.5
        option = draw.choice(("backbone", "partition", "dataset", "post", "protocol", "lr"))

        user_files = {str(evil): file_hash(evil)} if is_file_recorded else {}
        forge_record(folder / "r", path, text, is_stopped=is_stopped, user_files=user_files)
        tuned = {"method": "fedavg", "seed": "0", "options": {option: text}}
        (folder / "tuned.json").write_text(json.dumps(tuned))

        end = run_command_in_fork(folder, *command.split(), seconds=120)
        is_imported = (folder / "imported").exists()
    dotted_path = ".".join(map(str, path))
    description = f"{dotted_path}: {text!r}, {command}"
    if is_imported:
        return f"{description}: imported"
    if end.fault is not None:
        return f"{description}: {end.fault}"
    return None
