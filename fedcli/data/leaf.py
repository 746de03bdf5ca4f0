"""Reads FEMNIST as LEAF writes it, by writer."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcli.data.image_arrays import SPLITS, Columns
from fedcli.data.source import Source
from fedcli.reading import check_size, reading


class _Pages(NamedTuple):
    """What a writer of FEMNIST has written, in one of LEAF's folders."""

    folder: str
    writer: str
    images: np.ndarray  # uint8 [n, 28, 28]
    labels: np.ndarray  # [n]


def read_leaf(source: Source) -> Columns:
    """FEMNIST as LEAF writes it: `users`, and in `user_data` of each `x` (784 values in [0, 1]) and `y` (0 to 61).

    LEAF's folders `train` and `test` are the splits; without both, those of a fixed random tenth of the writers are the
    test split.
    """
    paths = [source.folder.absolute() / name for name in source.names if name.endswith(".json")]
    folders = {_folder_of(path) for path in paths}
    if folders >= set(SPLITS):
        chosen = set(SPLITS)
    elif "all_data" in folders:
        chosen = {"all_data"}
    else:
        chosen = folders
    if folders - chosen:
        source.notes.append(f"left out: {', '.join(sorted(folders - chosen))}")
    all_pages = _read_pages([path for path in paths if _folder_of(path) in chosen])
    writers, numbers = np.unique([pages.writer for pages in all_pages], return_inverse=True)
    if chosen == set(SPLITS):
        test = np.array([pages.folder == "test" for pages in all_pages])
    else:
        num_held_out = max(1, round(len(writers) / 10))
        held_out = np.random.default_rng(0).permutation(len(writers))[:num_held_out]
        test = np.isin(numbers, held_out)
    counts = [len(pages.labels) for pages in all_pages]
    return {
        "x": np.concatenate([pages.images for pages in all_pages]),
        "y": np.concatenate([pages.labels for pages in all_pages]),
        "writer": np.repeat(numbers, counts),
        "test": np.repeat(test, counts),
        "class_names": np.arange(62),
    }


def _folder_of(path: Path) -> str:
    """Returns the folder of one of LEAF's files by its name; `Train` is one of LEAF's too."""
    return path.parent.name.lower()


def _read_pages(paths: list[Path]) -> list[_Pages]:
    """Returns what the writers in some of LEAF's files have written, by folder and then by writer.

    A writer with the same pages in two files of a folder counts once.
    """
    written: dict[tuple[str, str], _Pages] = {}  # by folder and writer
    for path in paths:
        folder = _folder_of(path)
        with reading(path, "one of LEAF's files, with users and user_data"):
            content = json.loads(path.read_bytes())
            for writer in content["users"]:
                x = np.asarray(content["user_data"][writer]["x"])
                y = np.asarray(content["user_data"][writer]["y"])
                if x.shape != (len(y), 784) or not 0 <= x.min() <= x.max() <= 1:
                    raise ValueError(f"the writer {writer} has no images of 784 values from 0 to 1 with a label each")
                pixels = np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28)
                pages = written.setdefault((folder, writer), _Pages(folder, writer, pixels, y))
                if not (np.array_equal(pages.images, pixels) and np.array_equal(pages.labels, y)):
                    raise ValueError(f"another file has other images of the writer {writer}")
        check_size(sum(pages.images.size for pages in written.values()), path.parent)
    return [written[key] for key in sorted(written)]
