"""Data sets of Hugging Face's library: what it writes becomes the same set as an `.npz` file of these images."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedcli.data import datasets, imports
from fedcli.data.image_arrays import SPLITS
from tests.commands import run_command
from tests.image_files import (
    assert_same_dataset,
    encode_image,
    image_arrays,
    import_dataset,
    known_images,
    sorted_examples,
    write_zip,
)
from tests.user_errors import raises_user_error

NAMES = ["emu", "ant", "bee"]  # not in the order of letters, which labels must not depend on


@pytest.fixture
def library():
    return pytest.importorskip("datasets", reason="the extra hf is not installed")


def pictures(pixels):
    return [Image.fromarray(image) for image in pixels]


class Column(NamedTuple):
    """A column of a set: the library's type, and the values for each split."""

    feature: Any
    values: dict[str, list]


def splits_of(library, arrays, image="image", label="label", **others):
    """A `DatasetDict` of arrays in the `.npz` form; `others` are further columns by name."""
    num_classes = arrays["y_train"].max() + 1
    names = NAMES if num_classes == len(NAMES) else [str(number) for number in range(num_classes)]
    features = {image: library.Image(), label: library.ClassLabel(names=names)}
    features |= {name: column.feature for name, column in others.items()}
    splits = library.DatasetDict()
    for split in SPLITS:
        columns = {image: pictures(arrays[f"x_{split}"]), label: arrays[f"y_{split}"].tolist()}
        columns |= {name: column.values[split] for name, column in others.items()}
        splits[split] = library.Dataset.from_dict(columns, features=library.Features(features))
    return splits


def write_parquet(splits, folder):
    folder.mkdir(parents=True)
    for split, dataset in splits.items():
        dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_what_the_library_writes_is_the_set_of_its_images_and_class_names(tmp_path, library, shape):
    arrays = image_arrays(shape, 3)
    np.savez(tmp_path / "a.npz", **arrays, class_names=NAMES)
    expected = import_dataset("expected", tmp_path / "a.npz")
    splits = splits_of(library, arrays, image="picture", label="insect")
    splits.save_to_disk(tmp_path / "saved")
    write_parquet(splits, tmp_path / "parquet" / "data")
    for split in SPLITS:  # in a folder each, and in several files
        folder = tmp_path / "shards" / split
        folder.mkdir(parents=True)
        for number in range(2):
            shard = splits[split].shard(2, number, contiguous=True)
            shard.to_parquet(folder / f"{number:04}.parquet")
    files = {file.relative_to(tmp_path).as_posix(): file.read_bytes() for file in (tmp_path / "saved").rglob("*.*")}
    write_zip(tmp_path / "saved.zip", files)

    for path in ("hf:{}/saved", "hf:{}/parquet", "hf:{}/shards", "{}/saved", "{}/saved.zip"):
        assert_same_dataset(import_dataset("mine", path.format(tmp_path)), expected)
    assert expected.class_names == tuple(NAMES)


def test_labels_of_the_known_set_are_those_with_its_number_of_classes(tmp_path, library):
    arrays = known_images("cifar100", per_class=(2, 1))
    coarse_labels = {split: (arrays[f"y_{split}"] // 5).tolist() for split in SPLITS}
    coarse = Column(library.ClassLabel(num_classes=20), coarse_labels)
    splits_of(library, arrays, "img", "fine_label", coarse_label=coarse).save_to_disk(tmp_path / "saved")

    assert sorted_examples(import_dataset("cifar100", f"hf:{tmp_path}/saved"), "train", "y") == sorted_examples(
        arrays, "train", "y"
    )
    with raises_user_error(
        "which feature holds the labels (got fine_label, coarse_label)", "call it label, with rename_column."
    ):
        imports.import_path("mine", f"hf:{tmp_path}/saved")


def test_texts_are_class_names_and_domains_and_writers_are_kept(tmp_path, library):
    arrays = image_arrays((4, 4), 2, per_class=(6, 4))
    text = library.Value("string")
    count = {split: len(arrays[f"y_{split}"]) for split in SPLITS}
    domains = {}
    writers = {}
    for split in SPLITS:
        domains[split] = ["photo", "art"] * (count[split] // 2)
        writers[split] = [f"f{number}" for number in np.arange(count[split]) % 3]
    splits = splits_of(library, arrays, domain=Column(text, domains), writer=Column(text, writers))
    splits = splits.map(lambda row: {"target": f"class {row['label']}"}, remove_columns="label")
    splits.save_to_disk(tmp_path / "saved")

    dataset = import_dataset("mine", f"hf:{tmp_path}/saved")

    assert dataset.class_names == ("class 0", "class 1")
    assert dataset.domain_names == ("art", "photo")
    for split in SPLITS:
        arrays[f"domain_{split}"] = np.tile([1, 0], count[split] // 2)
        arrays[f"writer_{split}"] = np.arange(count[split]) % 3
        assert sorted_examples(dataset, split, "y", "domain", "writer") == sorted_examples(
            arrays, split, "y", "domain", "writer"
        )


def test_parquet_files_of_other_programs_are_read(tmp_path, library):
    arrays = image_arrays((8, 8, 3), 2)
    for split in SPLITS:
        files = [{"bytes": encode_image(image), "path": None} for image in arrays[f"x_{split}"]]
        pd.DataFrame({"image": files, "label": arrays[f"y_{split}"]}).to_parquet(tmp_path / f"{split}.parquet")
    dataset = import_dataset("mine", f"hf:{tmp_path}")
    assert sorted_examples(dataset, "test", "y") == sorted_examples(arrays, "test", "y")


def test_validation_stands_in_for_a_missing_test_split_alone(tmp_path, library):
    splits = splits_of(library, image_arrays((4, 4), 2))
    without_test = library.DatasetDict(train=splits["train"], validation=splits["test"])
    without_test.save_to_disk(tmp_path / "a")
    _, notes = imports.import_path("mine", f"hf:{tmp_path}/a")
    assert notes == ["tested on the split validation"]

    with_test = library.DatasetDict(**without_test, test=splits["test"], extra=splits["test"])
    with_test.save_to_disk(tmp_path / "b")
    _, notes = imports.import_path("mine", f"hf:{tmp_path}/b")
    assert notes == ["left out: extra, val"]


def test_images_of_mixed_sizes_need_a_size(tmp_path, library):
    splits = splits_of(library, image_arrays((8, 8, 3), 2))
    wide = splits["train"].select([0]).map(lambda row: {"image": Image.new("L", (9, 5), 7)})
    splits["train"] = library.concatenate_datasets([splits["train"], wide])
    splits.save_to_disk(tmp_path / "saved")
    with raises_user_error("'train[6]'", "its size is (9, 5)", "--size N"):
        imports.import_path("mine", f"hf:{tmp_path}/saved")
    imports.import_path("mine", f"hf:{tmp_path}/saved", 8)
    assert datasets.load("mine").x_train.shape == (7, 3, 8, 8)


def only_train(splits):
    del splits["test"]


def two_images(splits):
    for split in SPLITS:
        splits[split] = splits[split].map(lambda row: {"mask": row["image"]})


def no_image(splits):
    for split in SPLITS:
        splits[split] = splits[split].remove_columns("image").add_column("size", [1] * len(splits[split]))


def no_label(splits):
    splits["test"] = splits["test"].map(lambda row: {"label": -1})


def other_names(splits):
    feature = splits["test"].features["label"]
    splits["test"] = splits["test"].cast_column("label", type(feature)(names=feature.names[::-1]))


def a_broken_image(splits):
    feature = type(splits["test"].features["image"])
    stored = splits["test"].cast_column("image", feature(decode=False))
    splits["test"] = stored.map(lambda row, i: {"image": {"bytes": b"%!PS-Adobe" if i == 1 else row["image"]["bytes"]}},
                                with_indices=True).cast_column("image", feature())  # fmt: skip


BAD_SETS = {
    only_train: ("splits train and test (got train)", "train_test_split(test_size=0.2)", "save_to_disk"),
    two_images: ("several features are images (got image, mask)", "remove_columns"),
    no_image: ("no feature is an image (got label: ClassLabel", "size: Value('int64')", "cast_column"),
    no_label: ("the split test has images without label", "leave them out"),
    other_names: ("the feature 'label' differs", "['bee', 'ant', 'emu']", "to train on", "cast_column"),
    a_broken_image: ("1 of 15 images cannot be read", "'test[1]'", "PNG"),
}


@pytest.mark.parametrize("spoil", BAD_SETS, ids=lambda spoil: spoil.__name__)
def test_what_is_not_plain_is_refused_with_what_to_do(tmp_path, cache, library, spoil):
    splits = splits_of(library, image_arrays((4, 4), 3))
    spoil(splits)
    splits.save_to_disk(tmp_path / "saved")
    with raises_user_error(*BAD_SETS[spoil]):
        imports.import_path("mine", f"hf:{tmp_path}/saved")
    assert not cache.exists()


def test_a_set_without_splits_and_several_sets_are_refused(tmp_path, library):
    splits = splits_of(library, image_arrays((4, 4), 3))
    splits["train"].save_to_disk(tmp_path / "one")
    with raises_user_error("splits train and test (got none)"):
        imports.import_path("mine", f"hf:{tmp_path}/one")
    for name in ("small", "large"):
        write_parquet(splits, tmp_path / "two" / name)
    with raises_user_error("several data sets (got large, small)"):
        imports.import_path("mine", f"hf:{tmp_path}/two")


def test_an_image_that_is_only_a_path_is_never_opened(tmp_path, library):
    arrays = image_arrays((8, 8, 3), 2)
    Path(tmp_path / "secret.png").write_bytes(encode_image(arrays["x_train"][0]))
    for split in SPLITS:
        paths = [{"bytes": None, "path": f"{tmp_path}/secret.png"}] * len(arrays[f"y_{split}"])
        (tmp_path / "set").mkdir(exist_ok=True)
        pd.DataFrame({"image": paths, "label": arrays[f"y_{split}"]}).to_parquet(tmp_path / "set" / f"{split}.parquet")
    with raises_user_error("train[0] is not in the files", "secret.png"):
        imports.import_path("mine", f"hf:{tmp_path}/set")


def test_the_command_imports_a_set_and_a_run_takes_its_path(folder, library):
    splits_of(library, image_arrays((8, 8), 3, per_class=(8, 4))).save_to_disk("saved")
    result = run_command("data", "import", "mine", "hf:saved")
    assert result.stderr == ""
    assert result.stdout.startswith("mine: 24 training and 12 test images, 3 classes: ")
    assert imports.import_if_path("hf:saved") == imports.import_if_path("saved")


def test_the_library_and_a_folder_of_its_files_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    for set_of_library in (f"hf:{tmp_path}", tmp_path):
        with raises_user_error("pip install 'fedcli[hf]'"):
            imports.import_path("mine", set_of_library)
    for no_folder in ("hf:mnist", f"hf:{tmp_path}/train/state.json"):
        words = ("no folder", "save_to_disk", "hf:FOLDER")
        with raises_user_error(*words):
            imports.import_path("mine", no_folder)
