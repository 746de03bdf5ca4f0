"""Folders that are moved, removed or replaced while a run writes in them."""

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import fedcli
from fedcli import registry
from fedcli.runs.record import RECORD
from fedcli.runs.rounds import Listener
from tests.tiny_runs import contents
from tests.torture.kills import KILLED, options_of_small_run
from tests.torture.processes import fork
from tests.torture.stopped_runs import stopped_run

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


def lose_folder(number: int) -> str | None:
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
        is_copied_there = how.startswith("replace")
        if contents(other) != before or (is_copied_there and contents(folder) != before):
            return f"{description}: another run's files are other ones"
        is_moved = how not in ("remove", "unlock")
        if is_moved and has_other_status(folder.with_name("elsewhere")):
            return f"{description}: the moved record is another one"
    return None


def has_other_status(moved: Path) -> bool:
    """Whether the record in a folder that was moved, if it has one, says no longer that the run goes on."""
    (moved / ".lock").unlink(missing_ok=True)
    if not (moved / RECORD).is_file():
        return False
    return fedcli.load(moved).record["status"] != "running"
