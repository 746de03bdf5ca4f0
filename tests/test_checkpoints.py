"""What a checkpoint may hold: its content is checked where it is read, also where its digest is right."""

import pytest

from tests import torture


@pytest.mark.parametrize("kind", torture.CRAFTED + torture.WITH_MODELS)
def test_a_mutated_checkpoint_is_refused_in_a_line_or_ends_in_the_same_bits(kind):
    names = list(torture.crafts(kind))
    assert len(names) > 150
    faults = [fault for number in range(len(names)) if (fault := torture.craft(kind, number))]
    assert not faults
