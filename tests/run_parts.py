"""Parts of runs that tests compare: of their records, and of their folders."""

from fedcli.runs.checkpoints import PREVIOUS


def without_times(entries):
    """Returns the entries of a record's rounds without how long the rounds took."""
    untimed = []
    for entry in entries:
        untimed.append({key: value for key, value in entry.items() if key != "seconds"})
    return untimed


def reproducible_parts(record):
    """Returns the parts of a record that must not depend on whether its run was interrupted."""
    parts = {key: record[key] for key in ("summary", "status", "config", "cost", "partition")}
    return parts | {"rounds": without_times(record["rounds"])}


def file_names(folder):
    """Returns what is in a folder, but for the checkpoint before the last, which a slow machine may not have."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != PREVIOUS)


def file_contents(folder):
    """Returns the bytes of the files in a folder, by name, without the checkpoint before the last."""
    files = {name: folder / name for name in file_names(folder)}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}
