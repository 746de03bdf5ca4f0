"""A refusal of one line."""

import pytest

from fedcli.errors import UserError


def refused(call, *words):
    """The call raises a refusal of one line that holds all the words."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    for word in words:
        assert str(word) in text, text
