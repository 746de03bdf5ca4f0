"""Hostile files: records, archives and images that somebody made to break what reads them."""

import io
import json
import os
import random
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedcli.data.files import write_atomically
from fedcli.runs.records import write_record

NAMES = (
    "$\\frac$", "<script>alert(1)</script>", "two\nlines", "\x1b[31mred\x1b[0m", "=HYPERLINK(1)", "a|b", "`x`", "**b**",
    "\u202eabc", "\ud800", "x" * 20_000, "", "\x00", "%s{}", "[red]", "../../etc", "[a](b)", "\\input{x}",
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1.5, 10**30, -(10**400), 1e308, "", "text", [], {}, [[]], {"": {}}, [None], float("nan"),
    float("inf"), *NAMES,
)  # fmt: skip
LOOKS = (
    ("table", "{}"), ("table", "{}", "--format", "csv", "--metric", "best,domain,at:1/2,total-floats"),
    ("table", "{}", "--format", "latex"), ("plot", "{}"), ("plot", "{}", "--x", "floats"),
    ("plot", "{}", "--x", "seconds"),
    ("plot", "{}", "--kind", "drift"), ("plot", "{}", "--kind", "domains"), ("resume", "{}"), ("verify", "{}"),
    ("quality", "{}"), ("plot", "{}", "--kind", "confusion"), ("table", "--page", "{}"),
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every dictionary or list inside a value, with each of its keys."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


def spoil_record(source: Path, target: Path, draw: random.Random) -> str:
    """Writes a run folder whose record has something wild in it, with the digest that fits; says what."""
    record = json.loads(source.read_text())
    del record["rounds"][3:]
    target.mkdir(parents=True)
    (target / "intro.md").write_text("# A study\n")
    how = draw.choice(("value", "value", "value", "name", "name", "absent", "key", "bytes", "deep"))
    if how == "bytes":
        content = bytearray(source.read_bytes())
        for _ in range(draw.randint(1, 30)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (target / "record.json").write_bytes(content)
        return how
    if how == "deep":
        (target / "record.json").write_text("[" * 100_000)
        return how
    where, key = draw.choice(list(places(record)))
    if how == "absent":
        del where[key]
    elif how == "key" and isinstance(where, dict):
        where[draw.choice(NAMES)] = where.pop(key)
    else:
        where[key] = draw.choice(NAMES if how == "name" else VALUES)
    try:
        write_record(target, record)
    except (ValueError, KeyError):  # no run could write it, so without a digest
        write_atomically(target / "record.json", lambda path: path.write_text(json.dumps(record)))
    return f"{how} {key!r} {str(where.get(key) if isinstance(where, dict) else '')[:40]!r}"


# Archives and folders


def png(size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((size, size, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def images(classes: tuple[str, ...]) -> dict[str, bytes]:
    return {f"{part}/{name}/{part}{i}.png": png(32) for part in ("train", "test") for name in classes for i in range(2)}


def arrays(**more: Any) -> dict[str, Any]:
    x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    return {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **more}


def npz(path: Path, **more: Any) -> Path:
    np.savez_compressed(path, **arrays(**more))
    return path


def bomb_npz(path: Path, draw: random.Random) -> Path:
    """A few megabytes that unpack to gigabytes: a header that says so, and nothing but zeros."""
    shape = (draw.choice((3, 40)) * 2**20, 32, 32)
    npz(path)
    with zipfile.ZipFile(path) as old:
        kept = {name: old.read(name) for name in old.namelist() if name != "x_train.npy"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in kept.items():
            new.writestr(name, content)
        with new.open("x_train.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for _ in range(64):
                file.write(bytes(1 << 22))
    return path


def bomb_png(folder: Path) -> Path:
    for name, content in images(("a", "b")).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    Image.new("L", (30_000, 30_000)).save(folder / "train" / "a" / "train0.png")
    return folder


def as_zip(path: Path, files: dict[str, bytes], encrypted: bool = False) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    if encrypted:  # the flag in every header, local and central
        content = bytearray(path.read_bytes())
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            place = content.find(mark)
            while place >= 0:
                content[place + offset] |= 1
                place = content.find(mark, place + 4)
        path.write_bytes(content)
    return path


def as_tar(path: Path, files: dict[str, bytes], **about: Any) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in about.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content))
    return path


def leaf(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "all_data_0.json").write_text(content)
    return folder


def mat(folder: Path, labels: list[int]) -> Path:
    from scipy.io import savemat

    folder.mkdir()
    x, y = np.zeros((32, 32, 3, len(labels)), np.uint8), np.array(labels)[:, None]
    for part in ("train", "test"):
        savemat(folder / f"synth_{part}_32x32.mat", {"X": x, "y": y})
    return folder


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def fifo_inside(folder: Path) -> Path:
    bomb = images(("a", "b"))
    for name, content in bomb.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "train" / "a" / "z.png")
    return folder


def not_text(folder: Path) -> Path:
    for name in images(("a", "b")):
        place = os.fsencode(folder / name).replace(b"/b/", b"/\xff\xfe/")
        os.makedirs(os.path.dirname(place), exist_ok=True)
        Path(os.fsdecode(place)).write_bytes(png(32))
    return folder


def cut(path: Path, draw: random.Random) -> Path:
    content = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        del content[draw.randrange(len(content)) :]
    else:
        for _ in range(draw.randint(1, 20)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    return path


def listed(before: str = "") -> dict[str, bytes]:
    """MNIST-M's files, which have no checksum."""
    found = {}
    for part in ("train", "test"):
        found |= {f"mnist_m_{part}/{label}.png": png(32) for label in range(10)}
        found[f"mnist_m_{part}_labels.txt"] = "".join(f"{label}.png {label}\n" for label in range(10)).encode()
    return {before + name: content for name, content in found.items()}


def archive(folder: Path, kind: str, draw: random.Random) -> tuple[str, Path]:
    """Makes a hostile import of a kind; the name to import it under, and its path."""
    made = {
        "a FIFO": lambda: ("x", fifo(folder / "x.npz")),
        "a FIFO as archive": lambda: ("cinic10", fifo(folder / "a.tar.gz")),
        "a FIFO in a folder": lambda: ("x", fifo_inside(folder / "f")),
        "a bomb as npz": lambda: ("x", bomb_npz(folder / "x.npz", draw)),
        "a bomb as image": lambda: ("x", bomb_png(folder / "f")),
        "an encrypted zip": lambda: ("mnist-m", as_zip(folder / "t.zip", listed(), True)),
        "an encrypted npz": lambda: ("x", as_zip(folder / "x.npz", {"x_train.npy": b"x"}, True)),
        "a path out of a tar": lambda: ("mnist-m", as_tar(folder / "a.tgz", listed("../../"))),
        "a link in a tar": lambda: (
            "mnist-m", as_tar(folder / "a.tgz", listed(), type=tarfile.SYMTYPE, linkname="/etc/passwd")
        ),
        "deep JSON": lambda: ("femnist", leaf(folder / "l", "[" * 100_000)),
        "JSON of numbers": lambda: ("femnist", leaf(folder / "l", '{"users": [1], "user_data": {"1": 3}}')),
        "JSON of NaN": lambda: ("femnist", leaf(folder / "l", json.dumps(
            {"users": ["a", "b"], "user_data": {n: {"x": [[float("nan")] * 784], "y": [0]} for n in "ab"}}))),
        "labels from 11": lambda: ("synth-digits", mat(folder / "s", [*range(10), 23])),
        "a bomb in a tar": lambda: (
            "mnist-m", as_tar(folder / "a.tgz", {**listed(), "mnist_m_train/0.png": bytes(1 << 27)})
        ),
        "names that are no text": lambda: ("x", not_text(folder / "n")),
        "objects in npz": lambda: ("x", npz(folder / "x.npz", y_train=np.array([{}, 1, 2, 3], object))),
        "wild labels": lambda: ("x", npz(folder / "x.npz", y_train=np.array([0, 2**62, 1, 0]))),
        "wild names": lambda: ("x", npz(folder / "x.npz", class_names=np.array([draw.choice(NAMES[:4]), "b"]))),
        "a damaged npz": lambda: ("x", cut(npz(folder / "x.npz"), draw)),
        "a damaged tar": lambda: ("mnist-m", cut(as_tar(folder / "a.tgz", listed()), draw)),
        "a damaged zip": lambda: ("mnist-m", cut(as_zip(folder / "t.zip", listed()), draw)),
    }  # fmt: skip
    return made[kind]()


ARCHIVES = (
    "a FIFO", "a FIFO as archive", "a FIFO in a folder", "a bomb as npz", "a bomb as image", "an encrypted zip",
    "an encrypted npz", "a path out of a tar", "a link in a tar", "deep JSON", "JSON of numbers", "JSON of NaN",
    "labels from 11", "a bomb in a tar", "names that are no text", "objects in npz", "wild labels", "wild names",
    "a damaged npz", "a damaged tar", "a damaged zip",
)  # fmt: skip
