"""Converts the columns that readers return: pixels to bytes, labels to numbers from 0, images to squares.

A ValueError says what is wrong; `reading`, around it, adds in which file and what that must be.
"""

import math
import unicodedata
from collections import Counter

import numpy as np

from fedcli.data.image_arrays import NAMES_OF, Columns, are_texts, canonical_order, first_of_each, some_of


def convert(columns: Columns, notes: list[str]) -> Columns:
    """Returns the columns of a reader or of `join_splits` as `image_arrays.py` describes them; notes what was changed.

    Without a column `test` a fixed fifth of each class and domain becomes the test split. Channels may come first; rows
    of pixels are grey squares. Pixels in [0, 1] or [-1, 1] are stretched to 0 to 255. Black borders make images square.
    Labels may be in a column, one-hot, class names, count from 1, or leave numbers out.
    """
    x = _convert_pixels(columns["x"], notes)
    first_image = x[0]
    if all(np.array_equal(image, first_image) for image in x):
        raise ValueError(f"all of its {len(x)} images are alike")
    columns = dict(columns)  # those that were given stay as they are
    columns["x"] = x
    columns |= _number_labels(columns["y"], columns.get("class_names"))
    for name in sorted({"y", "domain", "writer", "place"} & columns.keys()):
        columns[name] = _convert_whole_numbers(name, columns[name])
    if "test" not in columns:
        columns["test"] = _choose_test_images(columns)
        notes.append("a fixed fifth of each class is kept to test on")
    num_train = len(x) - columns["test"].sum()
    if not 0 < num_train < len(x):
        raise ValueError(f"{num_train} images are to train and {len(x) - num_train} to test on, too few")
    columns["x"] = _pad_to_square(x, notes)
    y = columns["y"]
    num_classes = np.size(columns.get("class_names", np.unique(y)))
    if y.min() == 1 and y.max() == num_classes:
        columns["y"] = y - 1
        notes.append("the labels counted from 1")
    for name in sorted(NAMES_OF.keys() & columns.keys()):
        columns |= _number_from_0(name, columns, num_train, notes)
        _refuse_other_spelling(name, columns)
    trained = columns["y"][~columns["test"]]
    untrained = np.delete(columns["class_names"], np.unique(trained))
    if len(untrained):
        notes.append(f"without training images: {some_of(untrained.tolist())}")
    return columns


def _number_labels(y: np.ndarray, class_names: np.ndarray | None) -> Columns:
    """The labels as `y` `[N]`, of a column of them or of one-hot rows too, and `class_names` where they are names.

    Names are numbered in the order of the given `class_names`, or in that of the alphabet where it is None.

    Raises:
        ValueError: A label is none of the given names.
    """
    is_one_hot = y.ndim == 2 and y.shape[1] > 1 and (np.sort(y)[:, -2:] == [0, 1]).all()
    if is_one_hot:
        y = y.argmax(1)
    elif y.shape[1:] == (1,):
        y = y[:, 0]
    if not are_texts(y):
        return {"y": y}
    texts = y if y.dtype.kind in "US" else np.array(y.tolist())  # which has no kind that cannot be cast
    labels, numbers = np.unique(texts.astype(str), return_inverse=True)
    if class_names is None:
        return {"y": numbers, "class_names": labels}
    number_of_name = {name: number for number, name in enumerate(class_names.ravel().astype(str))}
    unnamed = [label for label in labels if label not in number_of_name]
    if unnamed:
        raise ValueError(f"the label '{unnamed[0]}' is none of class_names")
    given_numbers = np.array([number_of_name[label] for label in labels])
    return {"y": given_numbers[numbers]}


def _convert_whole_numbers(name: str, values: np.ndarray) -> np.ndarray:
    """Returns a column as int64 `[N]`; anything else than whole numbers is refused."""
    is_real = values.dtype.kind in "biuf"
    if values.ndim != 1 or not is_real or (np.rint(values) != values).any():
        raise ValueError(f"{name}_train or {name}_test is of type {values.dtype} and shape {values.shape}")
    return values.astype(np.int64)


def _choose_test_images(columns: Columns) -> np.ndarray:
    """Whether each image is of the fixed fifth of its class and domain."""
    domain = columns.get("domain", np.zeros(len(columns["x"]), np.int64))
    strata = columns["y"] * (domain.max() + 1) + domain
    return first_of_each(canonical_order(columns["x"], strata), strata)


def _pad_to_square(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """Returns the images with black borders that make them square; adds to the notes that there are some."""
    height, width = images.shape[1:3]
    if height == width:
        return images
    side = max(height, width)
    above = (side - height) // 2
    left = (side - width) // 2
    notes.append(f"black borders made the images {side} x {side}")
    return np.pad(images, [(0, 0), (above, side - height - above), (left, side - width - left), (0, 0)])


def _number_from_0(column: str, columns: Columns, num_train: int, notes: list[str]) -> Columns:
    """The numbers of a column of `NAMES_OF`, from 0, and a name for each; numbers that nothing has are left out.

    Raises:
        ValueError: Numbers and names do not fit, or a name cannot be shown.
    """
    numbers = columns[column]
    key = NAMES_OF[column]
    used = np.unique(numbers)
    most = num_train  # numbers that are no classes, as years, are large
    if key in columns:
        most = len(columns[key].ravel())
    least = used.min()
    greatest = used.max()
    if least < 0 or greatest >= most:
        fault = f"{column}_train or {column}_test counts from {least} to {greatest}"
        raise ValueError(f"{fault}, {key} or the training images from 0 to {most - 1}")
    if key in columns:
        names = columns[key].ravel().astype(str)
    else:
        names = used.astype(str)
        numbers = np.searchsorted(used, numbers)
        if len(used) <= greatest:
            noun = "classes" if column == "y" else "domains"
            notes.append(f"{len(used)} {noun}, whose numbers are {some_of(names.tolist())}")
    is_repeated = len(np.unique(names)) < len(names)
    if is_repeated or not all(name.isprintable() for name in names):
        raise ValueError(f"{key} has a name twice, or one of several lines")
    return {column: numbers, key: names}


def _refuse_other_spelling(column: str, columns: Columns) -> None:
    """Refuses classes or domains, by the column `y` or `domain`, that are two by the spelling of a name alone.

    Raises:
        ValueError: Two names are one in Unicode's composed form and without spaces around; or they are but for upper
            case, and one has training images alone and the other test images, in a set without A and a in one split.
    """
    key = NAMES_OF[column]
    names = [unicodedata.normalize("NFC", name).strip() for name in columns[key]]
    [(most_frequent, times)] = Counter(names).most_common(1)
    if times > 1:
        raise ValueError(f"'{most_frequent}' is in {key} with other spaces or in another Unicode form: rename one")
    is_test = columns["test"]
    trained = {names[number] for number in np.unique(columns[column][~is_test])}
    tested = {names[number] for number in np.unique(columns[column][is_test])}
    for names_of_split in (trained, tested):
        if len({name.casefold() for name in names_of_split}) < len(names_of_split):
            return  # case tells classes of this set apart
    only_tested = {name.casefold(): name for name in sorted(tested - trained)}
    for name in sorted(trained - tested):
        other = only_tested.get(name.casefold())
        if other is not None:
            raise ValueError(f"training images are of '{name}' and test images of '{other}': spell both alike")


def _convert_pixels(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """Returns the images as uint8 `[N, H, W, channels]`; adds to the notes what was changed."""
    shape = images.shape
    side = math.isqrt(shape[-1])
    if len(shape) == 2 and side**2 == shape[1]:
        images = images.reshape(-1, side, side)
        notes.append(f"rows of {shape[1]} pixels became images of {side} x {side}")
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        images = np.moveaxis(images, 1, 3)
        notes.append("the images' channels came first")
    if images.ndim == 3:
        images = images[..., None]
    if not images.size or images.shape[3:] not in ((1,), (3,)):
        raise ValueError(f"the images are of type {images.dtype} and shape {shape}")
    if images.dtype == np.uint8:
        return images
    low = float(images.min())  # NaN where there is one
    high = float(images.max())
    is_from_0_to_255 = low >= 0 and high <= 255
    is_from_minus_1_to_1 = low >= -1 and high <= 1
    if not (is_from_0_to_255 or is_from_minus_1_to_1):
        raise ValueError(f"pixels from {low:g} to {high:g} are not in 0 to 255, 0 to 1 or -1 to 1: undo normalisation")
    shift = 0
    scale = 1.0
    if low < 0:
        shift = 1
        scale = 127.5
    elif high <= 1:
        scale = 255.0
    notes.append(f"pixels x from {low:g} to {high:g} became 8 bits, (x + {shift}) * {scale:g}")
    return np.rint((images + shift) * scale).astype(np.uint8)
