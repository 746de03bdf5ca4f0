"""Image sets as Hugging Face's library `datasets` keeps them: what `save_to_disk` writes, or a folder of parquet files.

The library does not decode the images: they are read as all others are, and one that is only a path or an address is
refused.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

from fedcli.data.image_arrays import COLUMN_OF_WORD, NAMES_OF, SPLIT, Columns, choose_splits
from fedcli.data.pictures import stack_pictures
from fedcli.data.source import Source
from fedcli.errors import UserError, import_optional
from fedcli.reading import check_size

PREFIX = "hf:"  # before the path of such a folder
FILES = "Hugging Face's state.json or *.parquet"
PATTERN = r"(?:(?P<saved>state\.json)|[^/]*\.parquet)$"
_SPLIT = re.compile(f"(?i:(?:^|[/_.-]){SPLIT}(?=[/_.-]))")  # in a path, as in data/train-00000-of-00001.parquet


def read_hugging_face(source: Source) -> Columns:
    """Returns the columns of the splits train and test, with `validation` for a missing test.

    Raises:
        UserError: The library or a split is missing, it is not plain which feature holds the images or the labels, or
            some images cannot be read.
    """
    library = import_optional("datasets", "a data set of Hugging Face", "hf")
    files = _find_files(source)
    with TemporaryDirectory(prefix="fedcli-") as cache, _no_progress_bars(library):
        splits = {name: _read_split(library, paths, cache) for name, paths in files.items()}
        train, test = splits.values()
        features = train.features
        image = _find_image_feature(library, features)
        label = _find_label_feature(library, features, source)
        feature_of_column = {"y": label}
        for name in features:
            column = COLUMN_OF_WORD.get(name.lower())
            if column in ("domain", "writer"):
                feature_of_column[column] = name
        for name in (image, *feature_of_column.values()):
            if test.features.get(name) != features[name]:
                raise UserError(
                    f"the feature '{name}' differs between the splits (got {features[name]} to train on and "
                    f"{test.features.get(name)} to test on); make them alike with cast_column."
                )
        columns = {"x": _read_pixels(library, source, splits, image)}
        for column, name in feature_of_column.items():
            columns |= _read_values(library, splits, column, name)
    columns["test"] = np.repeat([False, True], [len(train), len(test)])
    return columns


def _find_files(source: Source) -> dict[str, list[Path]]:
    """Returns the files of the split to train on and of that to test on, by their names."""
    saved = [match for match in source.matches if match["saved"]]
    matches = saved or source.matches
    files: dict[str, list[Path]] = {}
    folders = set()
    for match in matches:
        named = list(_SPLIT.finditer(match.string))
        path = Path(match.string)
        if named:
            last = named[-1]
            split = last[1].lower()
            folders.add(match.string[: last.start()])
        else:  # a name of the user's own, as of a file or a folder
            split = path.parent.name if match["saved"] else path.stem
        files.setdefault(split, []).append(source.folder / path)
    if len(folders) > 1:
        raise UserError(f"there are several data sets (got {', '.join(sorted(folders))}); give the folder of one.")
    chosen = choose_splits(set(files), source.notes)
    if not set(chosen) <= set(files) or len(chosen) < 2:
        given = ", ".join(filter(None, sorted(files))) or "none"
        raise UserError(
            f"a data set must have splits train and test (got {given}); make them with "
            "dataset.train_test_split(test_size=0.2), and keep what that returns with save_to_disk."
        )
    if "val" in chosen:
        source.notes.append("tested on the split validation")
    return {split: files[split] for split in chosen}


def _read_split(library: ModuleType, paths: Sequence[Path], cache: str) -> Any:
    """Returns the `datasets.Dataset` of a split's files; parquet files are unpacked into the folder `cache`."""
    if all(path.suffix == ".json" for path in paths):
        saved = [library.load_from_disk(path.parent) for path in paths]
        return library.concatenate_datasets(saved)
    parquet = import_optional("pyarrow.parquet", "a data set of Hugging Face", "hf")
    for path in paths:
        metadata = parquet.read_metadata(path)
        row_groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        check_size(sum(group.total_byte_size for group in row_groups), path)
    return library.Dataset.from_parquet([str(path) for path in paths], cache_dir=cache)


def _find_image_feature(library: ModuleType, features: Any) -> str:
    """Returns the name of the one feature with images: of type `Image`, or as its files are stored."""
    names = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    if not names:  # files that other programs wrote
        names = [name for name, feature in features.items() if _holds_files(feature)]
    if not names:
        listed = ", ".join(f"{name}: {feature}" for name, feature in features.items())
        raise UserError(f"no feature is an image (got {listed}); make one so with cast_column(NAME, datasets.Image()).")
    if len(names) > 1:
        raise UserError(f"several features are images (got {', '.join(names)}); keep one of them, with remove_columns.")
    (name,) = names
    return name


def _holds_files(feature: Any) -> bool:
    """Whether a feature is a file's content, alone or beside its path."""
    if isinstance(feature, dict):
        return feature.keys() == {"bytes", "path"}
    return getattr(feature, "dtype", "") in ("binary", "large_binary")


def _find_label_feature(library: ModuleType, features: Any, source: Source) -> str:
    """Returns the name of the feature with the labels: called so, or the one with class names.

    Of a known set it is the one with as many classes, such as CIFAR-100's `fine_label`.
    """
    called = [name for name in features if COLUMN_OF_WORD.get(name.lower()) == "y"]
    classified = [name for name, feature in features.items() if isinstance(feature, library.ClassLabel)]
    if source.info:
        num_classes = len(source.info.class_names)
        classified = [name for name in classified if features[name].num_classes == num_classes]
    names = called or classified
    if len(names) != 1:
        candidates = ", ".join(names) or f"none of {', '.join(features)}"
        raise UserError(
            f"it is not plain which feature holds the labels (got {candidates}); call it label, with rename_column."
        )
    (name,) = names
    return name


def _read_pixels(library: ModuleType, source: Source, splits: dict[str, Any], feature: str) -> np.ndarray:
    """Returns the images of all splits, uint8 `[N, H, W, 1 or 3]`."""

    def pictures() -> Iterator[tuple[str, BytesIO]]:
        for split, dataset in splits.items():
            stored = dataset.select_columns([feature]).cast_column(feature, library.Image(decode=False))
            for i, row in enumerate(stored):
                name = f"{split}[{i}]"
                content = row[feature] or {"bytes": None, "path": None}
                if content["bytes"] is None:
                    fault = f"the image {name} is not in the files (got its path, {content['path']})"
                    raise UserError(f"{fault}; keep the data set with save_to_disk, which brings the images along.")
                yield name, BytesIO(content["bytes"])

    return stack_pictures(source, sum(map(len, splits.values())), pictures())


def _read_values(library: ModuleType, splits: dict[str, Any], column: str, feature: str) -> Columns:
    """Returns the values of a feature in all splits as a column, with their names where they have some."""
    listed = []
    for split, dataset in splits.items():
        split_values = dataset.with_format(None).select_columns([feature])[:][feature]
        if any(value is None or value == -1 for value in split_values):
            raise UserError(f"the split {split} has images without {feature} (got None or -1); leave them out.")
        listed.extend(split_values)
    values = np.array(listed)
    described = next(iter(splits.values())).features[feature]
    if isinstance(described, library.ClassLabel) and column in NAMES_OF:
        return {column: values, NAMES_OF[column]: np.array(described.names)}
    if values.dtype.kind not in "US":
        return {column: values}
    names, numbers = np.unique(values, return_inverse=True)
    if column not in NAMES_OF:
        return {column: numbers}
    return {column: numbers, NAMES_OF[column]: names}


@contextmanager
def _no_progress_bars(library: ModuleType) -> Iterator[None]:
    """Keeps the library from drawing bars on the terminal."""
    if library.are_progress_bars_disabled():
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
