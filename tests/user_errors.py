"""The check that something is refused as a user should be: by a `UserError` of one line."""

from contextlib import contextmanager

import pytest

from fedcli.errors import UserError


@contextmanager
def raises_user_error(*words):
    """Asserts that the block raises a `UserError` of one line, which ends with a period and holds all of the words.

    After the block the error is the `value` of what the context manager gives, as that of `pytest.raises`.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    for word in words:
        assert str(word) in message, message
