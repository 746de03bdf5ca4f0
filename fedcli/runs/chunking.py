"""How clients train together, as `--clients-per-chunk` says it."""

import re

from fedcli.core.engine import Chunking
from fedcli.core.stacked import BRANCHES, STACKED
from fedcli.errors import UserError


def parse_chunking(text: str) -> Chunking | None:
    """Reads `--clients-per-chunk`; `auto`, which leaves it to the device, is None.

    Raises:
        UserError: It is neither that nor a number of clients, perhaps as branches.
    """
    if text == "auto":
        return None
    match = re.fullmatch(f"({BRANCHES}:)?0*([1-9][0-9]{{0,8}})", text)
    if match is None:
        raise UserError(
            f"--clients-per-chunk must be auto, a whole number from 1, or branches: and such a number (got "
            f"'{text[:40]}'); 1 trains one client after the other."
        )
    prefix, number = match.groups()
    return Chunking(BRANCHES if prefix else STACKED, int(number))


def spell_chunking(chunking: Chunking) -> str:
    """Writes `--clients-per-chunk` as `parse_chunking` reads it."""
    return f"{BRANCHES}:{chunking.clients}" if chunking.way == BRANCHES else str(chunking.clients)
