"""The known data sets: names, shapes, classes, and where their images come from."""

import string
from collections.abc import Callable, Sequence

from fedcli.data.built_in import digit_domains, digits, photos
from fedcli.data.dataset_info import Archive, DatasetInfo, Maker
from fedcli.data.image_arrays import Columns
from fedcli.data.mixtures import Subset, femnist_digits, mixture

_DIGITS = tuple(string.digits)
_CHARACTERS = (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase)
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_EMNIST = DatasetInfo(channels=1, image_size=28, class_names=(), torchvision_class="EMNIST")
_OFFICE = DatasetInfo(
    channels=3, image_size=32, class_names=(), to_import="image folders <domain>/<class>/*", is_resized=True,
)  # fmt: skip


def _without_others(read: Callable[[], Columns]) -> Maker:
    """Returns the maker of a set that needs no other one."""
    return lambda load: read()


KNOWN = {
    "digits": DatasetInfo(
        channels=1, image_size=8, class_names=_DIGITS, num_train=1438, num_test=359, make=_without_others(digits),
    ),
    "digit-domains": DatasetInfo(
        channels=3, image_size=16, class_names=_DIGITS, num_train=5752, num_test=1436,
        domain_names=("plain", "inverted", "photo", "font"), make=_without_others(digit_domains),
    ),
    "photos": DatasetInfo(
        channels=3, image_size=16, class_names=("photo",), num_train=2000, num_test=200, make=_without_others(photos),
    ),
    "mnist": DatasetInfo(
        title="MNIST", channels=1, image_size=28, class_names=_DIGITS, num_train=60_000, num_test=10_000,
        torchvision_class="MNIST", fingerprint="94a3db3da708f867",
    ),
    "fmnist": DatasetInfo(
        title="Fashion-MNIST", channels=1, image_size=28, class_names=_FASHION, num_train=60_000, num_test=10_000,
        torchvision_class="FashionMNIST", fingerprint="237126ab7af84cf2",
    ),
    "emnist-digits": _EMNIST._replace(
        class_names=_DIGITS, num_train=240_000, num_test=40_000, emnist_split="digits",
    ).balanced(),
    "emnist-letters": _EMNIST._replace(
        class_names=tuple(string.ascii_lowercase), num_train=124_800, num_test=20_800, emnist_split="letters",
    ).balanced(),
    "emnist-byclass": _EMNIST._replace(
        class_names=_CHARACTERS, num_train=697_932, num_test=116_323, emnist_split="byclass",
    ),
    "cifar10": DatasetInfo(
        title="CIFAR-10", channels=3, image_size=32, class_names=_CIFAR10, num_train=50_000, num_test=10_000,
        torchvision_class="CIFAR10", fingerprint="079662f783f40c00",
    ),
    "cifar100": DatasetInfo(
        title="CIFAR-100", channels=3, image_size=32, class_names=("",) * 100, num_train=50_000, num_test=10_000,
        torchvision_class="CIFAR100", fingerprint="478e970f870f5c96",
    ),
    "svhn": DatasetInfo(
        title="SVHN", channels=3, image_size=32, class_names=_DIGITS, num_train=73_257, num_test=26_032,
        torchvision_class="SVHN",
        train_counts=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        test_counts=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    ),
    "usps": DatasetInfo(
        title="USPS", channels=1, image_size=16, class_names=_DIGITS, num_train=7_291, num_test=2_007,
        torchvision_class="USPS",
        train_counts=(1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
        test_counts=(359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
    ),
    "cinic10": DatasetInfo(
        title="CINIC-10", channels=3, image_size=32, class_names=_CIFAR10, num_train=90_000, num_test=90_000,
        archive=Archive(
            address="https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            md5="6ee4d0c996905fe93221de577967a372",
        ),
    ).balanced(),
    "tiny-imagenet": DatasetInfo(
        title="Tiny-ImageNet", channels=3, image_size=64, class_names=("",) * 200, num_train=100_000, num_test=10_000,
        archive=Archive(
            address="http://cs231n.stanford.edu/tiny-imagenet-200.zip", md5="90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ).balanced(),
    "femnist": DatasetInfo(
        title="FEMNIST", channels=1, image_size=28, class_names=_CHARACTERS,
        to_import="the folder of LEAF's all_data_*.json", is_resized=True,
    ),
    "synth-digits": DatasetInfo(
        channels=3, image_size=32, class_names=_DIGITS, num_train=479_400, num_test=9_553,
        to_import="SynthDigits.zip or its .mat files", is_resized=True,
    ),
    "mnist-m": DatasetInfo(
        title="MNIST-M", channels=3, image_size=28, class_names=_DIGITS, num_train=60_000, num_test=10_000,
        to_import="mnist_m.tar.gz or its folder", is_resized=True,
    ),
    "office-caltech": _OFFICE._replace(
        class_names=("",) * 10, domain_names=("amazon", "caltech", "dslr", "webcam"),
        domain_counts=(958, 1123, 157, 295),
    ),
    "office31": _OFFICE._replace(
        class_names=("",) * 31, domain_names=("amazon", "dslr", "webcam"), domain_counts=(2817, 498, 795)
    ),
    "office-home": _OFFICE._replace(
        class_names=("",) * 65, domain_names=("Art", "Clipart", "Product", "Real World"),
        domain_counts=(2427, 4365, 4439, 4357),
    ),
    # A domain from each of others.
    "femnist-digits": DatasetInfo(
        channels=1, image_size=28, class_names=_DIGITS, make=femnist_digits, needs=("femnist",),
    ),
    "mixed-digits": mixture(
        "mixed-digits",
        DatasetInfo(
            channels=3, image_size=28, class_names=_DIGITS, num_test=57_453,
            domain_names=("mnist", "svhn", "usps", "synth-digits", "mnist-m"),
        ),
        # The official training split of USPS has 7,291 images.
        Subset("mnist", 7430), Subset("svhn", 7430), Subset("usps", 7430, drawn_from="pooled"),
        Subset("synth-digits", 7430), Subset("mnist-m", 7430),
    ),
    "digits-4": mixture(
        "digits-4",
        DatasetInfo(
            channels=3, image_size=32, class_names=_DIGITS, num_test=47_592,
            domain_names=("mnist", "usps", "svhn", "synth-digits"),
        ),
        Subset("mnist", 150), Subset("usps", 80), Subset("svhn", 5000), Subset("synth-digits", 1800),
    ),
    # For real images without more than MNIST, in numbers as uneven as those of digits-4.
    "digits-real-4": mixture(
        "digits-real-4",
        DatasetInfo(
            channels=3, image_size=16, class_names=_DIGITS, num_test=2_077,
            domain_names=("mnist", "digits", "photo", "font"),
        ),
        Subset("mnist", 150, num_test=1000), Subset("digits", 80),
        Subset("digit-domains", 1200, domain="photo"), Subset("digit-domains", 600, domain="font"),
    ),
}  # fmt: skip


def _add_domain_sets(source: str, num_train: Sequence[int], num_test_leaky: int) -> None:
    """Adds what papers make of a set with domains: training images as published, and two kinds of test images."""
    info = KNOWN[source]
    leaky_info = info._replace(num_test=num_test_leaky)
    private = []
    for number, domain in zip(num_train, info.domain_names, strict=True):
        private.append(Subset(source, number, domain=domain))
    leaky = [subset._replace(drawn_from="leaky") for subset in private]
    KNOWN[f"{source}-private"] = mixture(f"{source}-private", info, *private)
    KNOWN[f"{source}-leaky"] = mixture(f"{source}-leaky", leaky_info, *leaky)


_add_domain_sets("office-caltech", num_train=(368, 431, 60, 113), num_test_leaky=2533)
_add_domain_sets("office31", num_train=(1082, 192, 305), num_test_leaky=4110)
_add_domain_sets("office-home", num_train=(1400, 2000, 2500, 2000), num_test_leaky=15588)
MADE = {name: info.needs for name, info in KNOWN.items() if info.make}  # the sets that each is made from
BUILT_IN = tuple(name for name, needs in MADE.items() if not needs)
UNSURE = ("mnist-m",)  # of which copies with other numbers of images are in use
DOWNLOADS = tuple(name for name, info in KNOWN.items() if info.is_download)
