"""What the core needs of a data set."""

from typing import Protocol

from torch import Tensor


class ImageSet(Protocol):
    """Images with labels, and with domains where there are some; `fedcli.data.dataset.Dataset` is one."""

    @property
    def x_train(self) -> Tensor:
        """Training images, uint8 `[N, channels, H, W]`."""

    @property
    def y_train(self) -> Tensor:
        """Their labels, int64 `[N]`."""

    @property
    def domain_train(self) -> Tensor | None:
        """The domain of each, int64 `[N]`, a position in `domain_names`; None where there are no domains."""

    @property
    def writer_train(self) -> Tensor | None:
        """The writer of each, int64 `[N]`; None where the set has no writers."""

    @property
    def place_train(self) -> Tensor | None:
        """The place of each in the set's files, int64 `[N]`; None where it has not come from files."""

    @property
    def x_test(self) -> Tensor:
        """Test images."""

    @property
    def y_test(self) -> Tensor:
        """Their labels."""

    @property
    def domain_test(self) -> Tensor | None:
        """The domain of each."""

    @property
    def domain_names(self) -> tuple[str, ...]:
        """The names of the domains; empty where there are none."""

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""

    @property
    def image_size(self) -> int:
        """Height and width of an image in pixels."""
