"""Files of a run that are damaged, cut or exchanged."""

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.torture.faults import attempt
from tests.torture.source_runs import STOPPED_RUNS, SourceRun, run_with_features, stopped_run

KINDS_OF_RUNS = (*STOPPED_RUNS, "features")


def run_to_damage(kind: str, seed: int) -> SourceRun:
    """Makes the run of a kind; trials damage copies of it."""
    if kind == "features":
        return run_with_features(seed)
    return stopped_run(kind, seed)


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


def damage_run(number: int) -> str | None:
    """A run with a damaged file is refused in a line, or comes to the same end."""
    kind = KINDS_OF_RUNS[number % len(KINDS_OF_RUNS)]
    source = run_to_damage(kind, seed=0)
    other = run_to_damage(kind, seed=1)
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(source.folder, Path(parent, "run"))
        change = damage_one_file(folder, other.folder, random.Random(number))
        description = f"{kind}, {change}"
        outcome, fault = attempt(lambda: source.outcome_of(folder), description)

    if outcome is None:
        return fault
    if change in ("exchange record.json", "exchange checkpoint.safetensors"):
        return f"{description}: not refused"
    if outcome != source.outcome:
        return f"{description}: other bits"
    return None
