"""What is known of a data set without its images."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedcli.data.image_arrays import Columns

# Makes the columns of a set, with a function that gives those of the sets that it needs.
Maker = Callable[[Callable[[str], Columns]], Columns]


class Archive(NamedTuple):
    """A file in the internet with the images of a set."""

    address: str
    md5: str


class DatasetInfo(NamedTuple):
    """Shape, classes and sizes of a data set, and where its images come from."""

    channels: int
    image_size: int  # pixels, height and width
    class_names: tuple[str, ...]  # in the order of the official labels; empty texts where the files name them
    num_train: int | None = None  # None where it depends on the files
    num_test: int | None = None
    torchvision_class: str | None = None  # that downloads it
    emnist_split: str | None = None  # which of EMNIST's sets it is, as torchvision calls it
    archive: Archive | None = None  # that is downloaded where torchvision has no class
    to_import: str = ""  # files that a user brings where there is no download
    is_resized: bool = False  # whether pictures in files, which may be of any size, are resized to `image_size`
    domain_names: tuple[str, ...] = ()
    make: Maker | None = None
    needs: tuple[str, ...] = ()  # the sets that it is made from
    fingerprint: str = ""  # of the official images; where it is not known, the numbers below and above tell other ones
    train_counts: tuple[int, ...] = ()  # training images of each class
    test_counts: tuple[int, ...] = ()
    domain_counts: tuple[int, ...] = ()  # images of each domain, of both splits
    title: str = ""  # in tables and figures; without one it is the name

    @property
    def is_download(self) -> bool:
        """Whether a command downloads it."""
        return self.torchvision_class is not None or self.archive is not None

    @property
    def sizes(self) -> dict[str, Any]:
        """Numbers of `train` and `test` images and of `classes`, and the `shape` (channels, H, W)."""
        shape = (self.channels, self.image_size, self.image_size)
        return {"train": self.num_train, "test": self.num_test, "classes": len(self.class_names), "shape": shape}

    def balanced(self) -> "DatasetInfo":
        """This set with as many images in each class as in every other one."""
        if self.num_train is None or self.num_test is None:
            raise ValueError("a set whose numbers of images are not known has no number for each class")
        count = len(self.class_names)
        train_counts = (self.num_train // count,) * count
        test_counts = (self.num_test // count,) * count
        return self._replace(train_counts=train_counts, test_counts=test_counts)
