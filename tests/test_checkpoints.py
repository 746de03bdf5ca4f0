"""What a checkpoint may hold, also where its digest is right, and which files in a run's folder are removed."""

import pytest

import fedcli
from fedcli.runs import checkpoints
from fedcli.runs.lock import locked
from tests.run_options import SHORT_RUN
from tests.run_parts import file_names
from tests.torture.crafted_states import FINISHED_KINDS, STOPPED_KINDS, possible_changes, read_crafted_file
from tests.torture.faults import found_faults

KINDS = STOPPED_KINDS + FINISHED_KINDS
# Every seventh change, from another one on for each kind; `make torture` tries 400 of each.
STEP = 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_checkpoint_is_refused_in_a_line_or_ends_in_the_same_bits(kind):
    changes = possible_changes(kind)
    numbers = range(KINDS.index(kind), len(changes), STEP)
    assert len(numbers) > 40
    assert {changes[number].how for number in numbers} == {change.how for change in changes}
    assert not found_faults(read_crafted_file(kind, number) for number in numbers)


FILES_OF_A_USER = [
    "states/notes.txt", "states/000001-2 (copy).safetensors", "states/.keep", ".notes.partial.txt",
    "states-backup/000001-0.safetensors", "states-1/notes.txt", "states-1/a/000001-0.safetensors", ".x.partial",
    ".1.partial.folder/file", "states/000009-9.safetensors/file",
]  # fmt: skip
FILES_OF_FEDCLI = [
    "states/000009-0.safetensors", "states-1/000001-0-again.safetensors", "states-2/000001-0.safetensors",
    ".12.partial.record.json", ".12-0123abcd.partial.record.json", ".record.json.12.partial",
    "states/.12-0123abcd.partial.000001-0.safetensors",
]  # fmt: skip


def test_only_files_that_fedcli_has_made_are_removed(tmp_path):
    folder = tmp_path / "run"
    fedcli.run("scaffold", out=folder, **SHORT_RUN, keep_states=True)

    def files():
        return [name for name in file_names(folder) if (folder / name).is_file()]

    files_of_run = files()
    for name in FILES_OF_A_USER + FILES_OF_FEDCLI:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    with locked(folder):
        checkpoints.remove_files(folder, [])

    assert files() == sorted(FILES_OF_A_USER + files_of_run)
