"""The archive that goes from one machine to the next, in parts that are small enough for one transfer each."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from open_runs import ClaimRun
from transfer import MIB, nbytes_to_carry, resume_files

from fedcli.runs.record import RECORD

PART_SIZE = 16 * MIB  # bytes of a file of the archive
ARCHIVE_SIZE = 62 * MIB  # bytes of the archive at most
RECORD_COMPRESSION = 3  # by how much a record is smaller in it, at least


def pack(runs: Sequence[ClaimRun], folder: Path) -> None:
    """Writes an archive in parts into a folder, in place of those that are there; says which runs are left behind.

    It has the records of all runs, and what those that go on need for it as far as there is room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    nbytes_of_records = sum(file.stat().st_size for file in files)
    room = ARCHIVE_SIZE - nbytes_of_records / RECORD_COMPRESSION
    unfinished = [run for run in begun if run.needs_running or run.lacks_quality]
    taken, left_behind = divide_by_room(unfinished, room)
    for run in left_behind:
        print(f"left behind: {run.label}, seed {run.setup.config.seed}: {nbytes_to_carry(run) / MIB:,.0f} MiB")
    for run in taken:
        files += resume_files(run)
    names = "\n".join(map(str, files))
    command = f"tar -cz -T - | split -b {PART_SIZE} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input=names)


def divide_by_room(runs: Sequence[ClaimRun], room: float) -> tuple[list[ClaimRun], list[ClaimRun]]:
    """Returns the runs that are carried in so many bytes, earlier ones first, and those that do not fit."""
    taken = []
    left_behind = []
    for run in runs:
        nbytes = nbytes_to_carry(run)
        if nbytes < room:
            taken.append(run)
            room -= nbytes
        else:
            left_behind.append(run)
    return taken, left_behind


def unpack(folder: Path) -> None:
    """Takes what another machine has packed; what is here already may be newer, and stays."""
    command = f"cat {shlex.quote(str(folder))}/evidence.tgz.* | tar -xz --skip-old-files"
    subprocess.run(command, shell=True, check=True)
