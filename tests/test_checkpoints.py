"""What a checkpoint may hold: its content is checked where it is read, also where its digest is right."""

from functools import partial

import pytest

from tests import torture


@pytest.mark.parametrize("kind", torture.CRAFTED + torture.WITH_MODELS)
def test_a_mutated_checkpoint_is_refused_in_a_line_or_ends_in_the_same_bits(kind):
    count = len(torture.possible_changes(kind))
    assert count > 150
    assert not torture.faults_of(partial(torture.craft, kind), count)
