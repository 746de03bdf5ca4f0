"""Arrays in another form, as other libraries have them: they are converted, and the user is told how."""

from typing import NamedTuple

import numpy as np
import pytest

from fedcli.data import datasets
from fedcli.data.image_arrays import SPLITS
from tests.commands import run_command
from tests.image_files import image_arrays, import_arrays
from tests.user_errors import raises_user_error

WHOLE = image_arrays((4, 4, 3), 3)
WHOLE["x_train"][0, 0, :2] = np.array([0, 255])[:, None]
GREY = image_arrays((4, 4), 3)
NAMED = {"class_names": ["a", "b", "c"]}
NAMED_IN_ORDER = {"class_names": ["c", "a", "b", "z"]}


def change_images(change, whole=WHOLE):
    """Returns arrays with a change of the images of both splits."""
    return whole | {f"x_{split}": change(whole[f"x_{split}"]) for split in SPLITS}


def change_labels(change, whole=WHOLE):
    """Returns arrays with a change of the labels of both splits."""
    return whole | {f"y_{split}": change(whole[f"y_{split}"]) for split in SPLITS}


def scale_images(arrays, low, high):
    """Returns arrays whose pixels are from `low` to `high` in place of 0 to 255."""
    return change_images(lambda x: x / 255 * (high - low) + low, arrays)


MEDICAL = {
    "train_images": WHOLE["x_train"],
    "train_labels": WHOLE["y_train"][:, None],
    "val_images": WHOLE["x_test"],
    "val_labels": WHOLE["y_test"],
    "test_images": WHOLE["x_test"],
    "test_labels": WHOLE["y_test"][:, None],
}
KERAS = {
    "X_train": WHOLE["x_train"],
    "Targets_train": WHOLE["y_train"],
    "X_val": WHOLE["x_test"],
    "Targets_val": WHOLE["y_test"],
}
BORDER = np.array([[1], [1], [1], [0]], np.uint8)


class Form(NamedTuple):
    """Arrays in another form, those in ours with the same images, and what a user is told."""

    arrays: dict[str, np.ndarray]
    ours: dict[str, np.ndarray]
    message: str


FORMS = {
    "from 0 to 255": Form(scale_images(WHOLE, 0, 255), WHOLE, "pixels x from 0 to 255 became 8 bits"),
    "from 0 to 1": Form(scale_images(WHOLE, 0, 1), WHOLE, "pixels x from 0 to 1 became 8 bits"),
    "from -1 to 1": Form(scale_images(WHOLE, -1, 1), WHOLE, "pixels x from -1 to 1 became 8 bits"),
    "channels first": Form(change_images(lambda x: x.transpose(0, 3, 1, 2)), WHOLE, "the images' channels came first"),
    "labels from 1": Form(change_labels(lambda y: y + 1), WHOLE, "the labels counted from 1"),
    "named labels from 1": Form(change_labels(lambda y: y + 1) | NAMED, WHOLE | NAMED, "from 1"),
    "4 x 3": Form(
        change_images(lambda x: x[:, :, :3]),
        change_images(lambda x: x * BORDER),
        "black borders made the images 4 x 4",
    ),
    "of two types": Form(change_images(lambda x: x.astype("float32" if len(x) == 9 else int)), WHOLE, "became 8 bits"),
    "one-hot labels": Form(change_labels(lambda y: np.eye(3)[y]), WHOLE, ""),
    "labels in a column": Form(change_labels(lambda y: y[:, None] / 1), WHOLE, "9 training and 6 test"),
    "MedMNIST": Form(MEDICAL, WHOLE, "left out: val"),
    "Keras": Form(KERAS, WHOLE, ""),
    "labels in words": Form(change_labels(lambda y: np.array(["a", "b", "c"])[y]), WHOLE | NAMED, ""),
    "labels in words in an order": Form(
        change_labels(lambda y: np.array(["c", "a", "b"])[y]) | NAMED_IN_ORDER,
        WHOLE | NAMED_IN_ORDER,
        "without training images: z",
    ),
    "rows": Form(change_images(lambda x: x.reshape(-1, 16), GREY), GREY, "rows of 16 pixels became images of 4 x 4"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_in_another_form_are_converted_and_that_is_said(tmp_path, form):
    expected = import_arrays("whole", tmp_path / "a", **form.ours)
    np.savez(tmp_path / "odd.npz", **form.arrays)
    assert form.message in run_command("data", "import", "mine", tmp_path / "odd.npz").output
    imported = datasets.load("mine")
    assert imported.fingerprint == expected.fingerprint
    assert imported.class_names == expected.class_names


def test_labels_from_1_that_their_names_explain_stay(tmp_path):
    arrays = change_labels(lambda y: y + 1, image_arrays((4, 4), 2))
    dataset = import_arrays("mine", tmp_path / "a", **arrays, class_names=["none", "a", "b"])
    assert dataset.y_train.unique().tolist() == [1, 2]


@pytest.mark.parametrize("splits", [SPLITS, SPLITS[::-1]])
def test_case_tells_classes_apart_where_a_split_has_both(splits, tmp_path):
    one, other = splits
    names = {one: np.array(["A", "b", "B"]), other: np.array(["a", "b", "B"])}
    letters = image_arrays((4, 4), 3)
    letters |= {f"y_{split}": names[split][letters[f"y_{split}"]] for split in SPLITS}
    assert import_arrays("mine", tmp_path / "a", **letters).class_names == ("A", "B", "a", "b")


def test_pixels_in_no_known_range_are_refused(tmp_path):
    too_wide = scale_images(image_arrays((4, 4), 3), -2, 2.5)
    with raises_user_error("-2 to 2", "normalisation"):
        import_arrays("mine", tmp_path / "a", **too_wide)

    with_nan = scale_images(image_arrays((4, 4), 3), 0, 1)
    with_nan["x_test"][0, 0, 0] = np.nan
    with raises_user_error("nan to nan", "normalisation"):
        import_arrays("mine", tmp_path / "a", **with_nan)
