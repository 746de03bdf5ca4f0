"""The check that a call is refused as a user should be: by a `UserError` of one line."""

import pytest

from fedcli.errors import UserError


def assert_refused(call, *words):
    """Asserts that a call raises a `UserError` of one line, which ends with a period and holds all of the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    for word in words:
        assert str(word) in message, message
