"""The archive that goes from one machine to the next, in parts that are small enough for one transfer each."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from open_runs import ClaimRun
from transfer import MIB, divide_by_room, nbytes_to_carry, resume_files, room_beside_records

from fedcli.errors import UserError
from fedcli.runs.record import RECORD

PART_SIZE = 16 * MIB  # bytes of a file of the archive
PARTS = "evidence.tgz.*"


def pack(runs: Sequence[ClaimRun], folder: Path) -> None:
    """Writes an archive of runs into a folder, and prints which runs it leaves behind.

    It has the records of all runs, and what unfinished runs go on from as far as there is room.
    """
    begun = [run for run in runs if run.record]
    unfinished = [run for run in begun if run.needs_running or run.lacks_quality]
    taken, left_behind = divide_by_room(unfinished, room_beside_records(begun))
    for run in left_behind:
        print(f"left behind: {run.title}, seed {run.setup.config.seed}: {nbytes_to_carry(run) / MIB:,.0f} MiB")
    files = [run.folder / RECORD for run in begun]
    for run in taken:
        files += resume_files(run)
    write_archive(files, folder)


def write_archive(files: Sequence[Path], folder: Path) -> None:
    """Writes files into an archive in parts, which replace those in the folder once all of them are written.

    Raises:
        subprocess.CalledProcessError: If the archive cannot be written; the old parts are still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = "\n".join(map(str, files))
    with TemporaryDirectory(dir=folder) as temporary:
        whole = Path(temporary) / "whole.tgz"
        subprocess.run(["tar", "-czf", whole, "-T", "-"], check=True, text=True, input=names)
        start_of_names = whole.with_name("evidence.tgz.")
        subprocess.run(["split", "-b", str(PART_SIZE), "-d", "-a", "1", whole, start_of_names], check=True)
        for old_part in folder.glob(PARTS):
            old_part.unlink()
        for part in whole.parent.glob(PARTS):
            part.rename(folder / part.name)


def unpack(folder: Path) -> None:
    """Unpacks the archive of another machine, but for files that are here already, which may be newer.

    Raises:
        UserError: If there is none in the folder.
        subprocess.CalledProcessError: If the archive is not whole.
    """
    parts = [part.read_bytes() for part in sorted(folder.glob(PARTS))]
    if not parts:
        raise UserError(
            f"there is no archive to go on from (got {folder}, without {PARTS}); name a folder that has one."
        )
    subprocess.run(["tar", "-xz", "--skip-old-files"], check=True, input=b"".join(parts))
