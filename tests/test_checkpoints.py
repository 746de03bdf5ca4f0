"""What a checkpoint may hold: its content is checked where it is read, also where its digest is right."""

import pytest

from tests.torture.crafted_states import FINISHED_KINDS, STOPPED_KINDS, possible_changes, read_crafted_file
from tests.torture.faults import found_faults

KINDS = STOPPED_KINDS + FINISHED_KINDS
# Every seventh change, from another one on for each kind; `make torture` tries 400 of each.
STEP = 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_checkpoint_is_refused_in_a_line_or_ends_in_the_same_bits(kind):
    changes = possible_changes(kind)
    numbers = range(KINDS.index(kind), len(changes), STEP)
    assert len(numbers) > 40
    assert {changes[number].how for number in numbers} == {change.how for change in changes}
    assert not found_faults(read_crafted_file(kind, number) for number in numbers)
