"""What a checkpoint may hold: its content is checked where it is read, also where its digest is right."""

from functools import partial

import pytest

from tests.torture.crafted_states import FINISHED_KINDS, STOPPED_KINDS, possible_changes, read_crafted_file
from tests.torture.faults import faults_of


@pytest.mark.parametrize("kind", STOPPED_KINDS + FINISHED_KINDS)
def test_a_mutated_checkpoint_is_refused_in_a_line_or_ends_in_the_same_bits(kind):
    count = len(possible_changes(kind))
    assert count > 150
    assert not faults_of(partial(read_crafted_file, kind), count)
