"""What is refused where something is declared, since nothing that reads it would notice."""

from collections.abc import Collection
from typing import Any

from fedcli.errors import UserError


def require_texts(subject: str, value: Any, noun: str) -> None:
    """Refuses what is no tuple of texts, and a text in its place, each of whose letters would be taken for an item.

    Args:
        subject: What the message calls the value, as "columns of the claim 'mine:ahead'".
        value: The value.
        noun: What the items are, as "titles".
    """
    if isinstance(value, str):
        raise UserError(f"{subject} must be a tuple of {noun} (got {value!r}); write ({value!r},).")
    if not isinstance(value, Collection) or not all(isinstance(item, str) for item in value):
        raise UserError(
            f"{subject} must be a tuple of {noun} (got {value!r}); write each as a text, in quotation marks."
        )


def refuse_other(subject: str, value: Any, allowed: Collection[Any]) -> None:
    """Refuses a value that is none of those allowed."""
    if value not in allowed:
        raise UserError(f"{subject} must be {' or '.join(allowed)} (got {value!r}); choose one of them.")
