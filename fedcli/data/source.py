"""The files that a set is read from."""

import re
from pathlib import Path
from typing import NamedTuple

from fedcli.data.dataset_info import DatasetInfo


class Source(NamedTuple):
    """The files that a set is read from."""

    folder: Path  # the folder that holds them
    names: list[str]  # their paths in it, in order
    matches: list[re.Match]  # of the pattern of their file format
    info: DatasetInfo | None  # of the known set that they are to be
    size: int | None  # pixels, height and width that images are resized to
    notes: list[str]  # what the user is told about the reading
