"""The archive that goes from one machine to the next, in parts that are small enough for one transfer each."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from carried import MIB, files_of, nbytes_of
from open_runs import OpenRun

from fedcli.runs.record import RECORD

PART_SIZE = 16 * MIB  # bytes of a file of the archive
ARCHIVE_SIZE = 62 * MIB  # bytes of the archive at most


def pack(runs: Sequence[OpenRun], folder: Path) -> None:
    """Writes what is carried of runs as parts of an archive in a folder, in place of those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    names = "\n".join(map(str, files_to_pack(runs)))
    command = f"tar -cz -T - | split -b {PART_SIZE} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input=names)


def files_to_pack(runs: Sequence[OpenRun]) -> list[Path]:
    """Returns all records, and what runs go on from as far as there is room; says which runs are left behind."""
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE_SIZE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in begun:
        goes_on = run.to_do or run.lacks_quality
        if not goes_on:
            continue
        nbytes = nbytes_of(run)
        if nbytes < room:
            files += files_of(run)
            room -= nbytes
        else:
            print(f"left behind: {run.label}, seed {run.setup.config.seed}: {nbytes / MIB:,.0f} MiB")
    return files


def unpack(folder: Path) -> None:
    """Takes what another machine has packed; what is here already may be newer, and stays."""
    command = f"cat {shlex.quote(str(folder))}/evidence.tgz.* | tar -xz --skip-old-files"
    subprocess.run(command, shell=True, check=True)
