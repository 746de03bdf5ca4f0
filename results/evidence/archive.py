"""The archive that goes from one machine to the next, in parts that are small enough for one transfer each.

It has the records of runs, and as far as there is room what unfinished runs go on from.
"""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from open_runs import OpenRun

from fedcli.check import keeps_state
from fedcli.core import backbones
from fedcli.core.client_states import STATES
from fedcli.data import datasets
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.results.plans import PlannedRun
from fedcli.run_files import CHECKPOINT, RECORD, SELECTED
from fedcli.runs.options import RunConfig

MIB = 2**20
PART_SIZE = 16 * MIB  # bytes of a file of the archive
PART_PREFIX = "evidence.tgz."
PART_PATTERN = f"{PART_PREFIX}*"
ARCHIVE_SIZE = 4 * PART_SIZE - 2 * MIB  # bytes of its files at most; the rest is for names and padding
RECORD_COMPRESSION = 3  # by how much a record is smaller in it, at least


class Contents:
    """The files that go into an archive, as long as it has room for them.

    Attributes:
        files: Those that go into it.
        free_bytes: The number of bytes that still fit; negative if the records alone are too large.
    """

    def __init__(self, runs: Iterable[PlannedRun]):
        """Begins with the records of runs, which go into it whatever their size."""
        records = [run.folder / RECORD for run in runs]
        self.files = [record for record in records if record.is_file()]
        nbytes = sum(record.stat().st_size for record in self.files)
        self.free_bytes = ARCHIVE_SIZE - nbytes / RECORD_COMPRESSION

    def add(self, files: Sequence[Path], nbytes: int) -> bool:
        """Adds files of so many bytes if there is room for them; returns whether there is."""
        if nbytes >= self.free_bytes:
            return False
        self.files += files
        self.free_bytes -= nbytes
        return True

    def add_run(self, run: OpenRun) -> bool:
        """Adds what the next machine needs to go on with a run if there is room for it; returns whether there is."""
        return self.add(files_to_resume(run), nbytes_to_resume(run))


def pack(runs: Sequence[OpenRun], folder: Path) -> None:
    """Writes an archive of the runs that have started into a folder, and prints what it has no room for."""
    started_runs = [run for run in runs if run.record]
    contents = Contents(started_runs)
    resumable_runs = []
    for run in started_runs:
        if not (run.needs_running or run.lacks_quality):
            continue
        if contents.add_run(run):
            resumable_runs.append(run)
        else:
            print_left_behind(run, "what it goes on from", nbytes_to_resume(run))
    for run in resumable_runs:
        add_best_models(run, contents)
    write_archive(contents.files, folder)


def add_best_models(run: OpenRun, contents: Contents) -> None:
    """Adds the models of the best round so far of a run that has not ended, if its features are to be measured.

    The run goes on without them. Its features can be measured then only if one of its later rounds is the best.
    """
    file = run.folder / SELECTED
    if not (run.needs_running and run.needs_quality and file.is_file()):
        return
    nbytes = file.stat().st_size
    if not contents.add([file], nbytes):
        print_left_behind(run, "the models of its best round so far", nbytes)


def print_left_behind(run: OpenRun, what: str, nbytes: int) -> None:
    """Prints what of a run the archive has no room for."""
    print(f"left behind: {run.title}, seed {run.setup.config.seed}: {what}, {nbytes / MIB:,.0f} MiB")


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
        start_of_names = whole.with_name(PART_PREFIX)
        subprocess.run(["split", "-b", str(PART_SIZE), "-d", "-a", "1", whole, start_of_names], check=True)
        for old_part in folder.glob(PART_PATTERN):
            old_part.unlink()
        for part in whole.parent.glob(PART_PATTERN):
            part.rename(folder / part.name)


def unpack(folder: Path) -> None:
    """Unpacks the archive of another machine, but for files that are here already, which may be newer.

    Raises:
        UserError: If there is none in the folder.
        subprocess.CalledProcessError: If the archive is not whole.
    """
    parts = [part.read_bytes() for part in sorted(folder.glob(PART_PATTERN))]
    if not parts:
        raise UserError(
            f"there is no archive to go on from (got {folder}, without {PART_PATTERN}); name a folder that has one."
        )
    subprocess.run(["tar", "-xz", "--skip-old-files"], check=True, input=b"".join(parts))


def files_to_resume(run: OpenRun) -> list[Path]:
    """Returns the files of a run without which the next machine could not go on, beside its record.

    Of a run that has finished these are what `fedcli quality` reads, with the models of the best round where they are
    not those of the last one.
    """
    files = [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]
    if run.lacks_quality:
        files += run.folder.glob(SELECTED)
    return files


def nbytes_to_resume(run: OpenRun) -> int:
    """Returns the bytes of a run's `files_to_resume`; before there are any, of the models that they will have."""
    files = files_to_resume(run)
    if files:
        return sum(file.stat().st_size for file in files)
    return nbytes_of_models(run.setup.method, run.setup.config)


def nbytes_of_models(method: Method, config: RunConfig) -> int:
    """Returns the bytes of the models in the state of a run: a model of its own for each client, and the server's.

    Where clients keep nothing there is one for each network; else the server has one if its state has parameters
    beside the field `clients`.
    """
    backbone_names = config.backbone.split(",")
    sizes = [nbytes_of_network(name, config.dataset) for name in backbone_names]
    if not keeps_state(method):
        return sum(sizes)
    nbytes = 0
    if any({"clients", "params"} <= {*state_type._fields} for state_type in method.state_types):
        nbytes += sizes[0]
    for client in range(config.num_clients):
        nbytes += sizes[client % len(sizes)]
    return nbytes


def nbytes_of_network(name: str, dataset: str) -> int:
    """Returns the bytes of a network's parameters and buffers for the images of a data set."""
    images = datasets.describe(dataset)
    channels, height, _ = images["shape"]
    with torch.device("meta"):
        network = backbones.build(name, channels, height, images["classes"], seed=0)
    return sum(value.nbytes for value in network.state_dict().values())
