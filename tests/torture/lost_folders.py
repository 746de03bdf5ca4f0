"""Folders that are moved, removed or replaced while a run writes in them."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import fedcli
from fedcli import registry
from fedcli.run_files import RECORD
from fedcli.runs.record import read_record
from fedcli.runs.rounds import Listener
from tests.run_parts import file_contents
from tests.torture.kills import KILLED_METHODS, options_of_small_run
from tests.torture.processes import run_in_fork
from tests.torture.source_runs import stopped_run

# How a run's folder may be lost, where another run has its own.


def move(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def remove(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)


def unlock(folder: Path, other: Path) -> None:
    (folder / ".lock").unlink(missing_ok=True)


def replace_by_copy(folder: Path, other: Path) -> None:
    move(folder, other)
    shutil.copytree(other, folder)


def replace_by_link(folder: Path, other: Path) -> None:
    move(folder, other)
    folder.symlink_to(other)


LOSSES = (move, remove, unlock, replace_by_copy, replace_by_link)


class FolderLosingListener(Listener):
    """Loses the folder of its run after so many batches."""

    def __init__(self, batches: int, lose: Callable[[], None]):
        self.batches_left = batches
        self.lose = lose

    def samples(self, count: int) -> None:
        self.batches_left -= 1
        if self.batches_left == 0:
            self.lose()


def lose_folder(number: int) -> str | None:
    """A run that loses its folder ends in a line, and changes nothing in what stands there now."""
    draw = random.Random(number)
    lose = LOSSES[number % len(LOSSES)]
    method = registry.find_method(KILLED_METHODS[number // len(LOSSES) % len(KILLED_METHODS)])
    description = f"{method.name}, {lose.__name__}"
    options = options_of_small_run(method)
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        other = Path(parent, "other")
        shutil.copytree(stopped_run("client state").folder, other)
        (other / ".lock").touch()  # of a process that goes on with it
        before = file_contents(other)

        listener = FolderLosingListener(draw.randint(1, 4), partial(lose, folder, other))
        end = run_in_fork(lambda: fedcli.run(method.name, out=folder, progress=listener, **options))

        if end.code == 0 or "FolderLost" not in end.errors:
            return f"{description}: {end.code}, {end.errors.strip().splitlines()[-1:]}"
        if file_contents(other) != before:
            return f"{description}: another run's files are other ones"
        if lose is replace_by_copy and file_contents(folder) != before:
            return f"{description}: the copy of another run has other files"
        moved = folder.with_name("elsewhere")
        if (moved / RECORD).is_file() and read_record(moved)["status"] != "running":
            return f"{description}: the moved record is another one"
    return None
