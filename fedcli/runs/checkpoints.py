"""The files that a run goes on from: trees of tensors with what is said of them, whole and of one run, or refused.

A file has the form of safetensors, which other programs read: the length of its header in 8 bytes, little end first;
the header in JSON, each tensor's `dtype`, `shape` and `data_offsets` by name; then the tensors' bytes. The header's
`__metadata__` begins with the SHA-256 of the whole file, taken with zeros in its own place. In it are also the run's
identity, the structure of the tree, in which tensors are named, and what the record said by then.
"""

import hashlib
import json
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core.federation import Federation
from fedcli.core.trees import Tree, from_names, to_names
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.records import identity

CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint-before.safetensors"
OLD = "checkpoint.pt"  # as versions before this form named it
STATES = "states"  # folder of what clients keep, see fedcli/runs/store.py
OF_WORKER = "-w"  # in the names of what every worker but the first keeps there for itself
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
START = b'{"__metadata__":{"sha256":"'  # of a header, up to the digest
DIGEST = slice(8 + len(START), 8 + len(START) + 64)
IN_CHECKPOINT = ("rounds", "cost", "seconds_total", "peak_bytes")  # what a round adds to the record
SHARE, LONGEST = 0.05, 600.0  # of the time that checkpoints may take; seconds between two of them


class Damaged(Exception):
    """A file is not as it was written; the text says by what that shows."""


class Found(NamedTuple):
    """What a run goes on from."""

    state: Any  # the method's
    known: dict[str, Any]  # of the record
    note: str | None  # what was wrong with a newer checkpoint


def save(path: Path, tree: Tree, about: Mapping[str, Any]) -> str:
    """Writes a tree of tensors, numbers and texts to a file.

    Args:
        path: The file.
        tree: Its NamedTuples are kept by name, and of what a store keeps the names of the versions.
        about: What else the file says, as JSON can say it.

    Returns:
        The file's SHA-256, taken as it stands in it.
    """
    structure, tensors = to_names(tree)
    return write_tensors(path, tensors, {"tree": json.dumps(structure), "about": json.dumps(dict(about))})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Writes tensors by name to a file, and texts that say more; returns its SHA-256 as `save` does."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # every one at a multiple
    header, offset = {"__metadata__": {"sha256": "0" * 64, **metadata}}, 0
    for name, tensor in tensors.items():
        span = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())):
            digest.update(part)
            file.write(part)
        file.seek(DIGEST.start)
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def load(
    path: Path,
    types: Mapping[str, Callable[..., Any]] | None = None,
    device: torch.device | str = "cpu",
    digest: str | None = None,
) -> tuple[Tree, dict[str, Any]]:
    """Reads what `save` has written.

    Args:
        path: The file.
        types: The NamedTuple classes of the tree by name, and under `kept` what makes of its rows what a store keeps.
        device: Of the tensors.
        digest: What `save` returned, where that is known.

    Returns:
        The tree, and what else the file says.

    Raises:
        Damaged: If a byte is not the one that was written.
        UserError: If a NamedTuple is none of the types.
    """
    with _whole(path, digest) as content:
        header = _header(content)
        begin = 8 + int.from_bytes(content[:8], "little")
        metadata = header.pop("__metadata__")
        tensors = {}
        for name, about in header.items():
            start, end = about["data_offsets"]
            raw = torch.empty(end - start, dtype=torch.uint8)  # of its own: rounding may depend on where bytes lie
            raw.numpy()[:] = memoryview(content)[begin + start : begin + end]
            tensors[name] = raw.view(DTYPES[about["dtype"]]).reshape(about["shape"]).to(device)
        structure, about = json.loads(metadata["tree"]), json.loads(metadata["about"])
    try:
        return from_names(structure, tensors, types or {}), about
    except (KeyError, TypeError) as error:  # a NamedTuple that is none of the types, or has other fields
        allowed = ", ".join(name for name in types or {} if name != "kept")
        raise UserError(
            f"the file '{path}' holds a state of another kind (got {error}; {allowed} are allowed); read it with the "
            "method that wrote it."
        ) from None


def verify(path: Path, digest: str) -> None:
    """Reads a file through that `save` has written.

    Raises:
        Damaged: If a byte is not the one that was written, or it is another file.
    """
    with _whole(path, digest):
        pass


class Pace:
    """When a checkpoint is due: every so many rounds, and after the last.

    Where it is not said how many, so often that checkpoints take a twentieth of the time at most, but at least every
    ten minutes. The first is due after the first round, and shows what one takes.
    """

    def __init__(self, every: int | None, rounds: int):
        self._every, self._rounds = every, rounds
        self._taken, self._end = 0.0, time.perf_counter()  # seconds of the last one, and when it ended

    def due(self, number: int) -> bool:
        """True where round `number`, from 0, is to end with a checkpoint."""
        if number + 1 == self._rounds:
            return True
        if self._every is not None:
            return (number + 1) % self._every == 0
        wait = min(self._taken * (1 / SHARE - 1), LONGEST)
        return time.perf_counter() - self._end >= wait

    def timed(self, write: Callable[..., None], *given: Any) -> None:
        """Writes a checkpoint by what is given, and takes note of the time that it took."""
        start = time.perf_counter()
        write(*given)
        self._end = time.perf_counter()
        self._taken = self._end - start


def write_checkpoint(folder: Path, record: dict[str, Any], state: Any) -> None:
    """Writes the state and all that the record knows by then; the checkpoint before it is kept.

    After a kill either file, this or the record, may be the older one.
    """
    file = folder / CHECKPOINT
    kept = list(_kept(state))
    for one in kept:
        one.write()
    about = {
        "identity": identity(record),
        "record": {key: record[key] for key in IN_CHECKPOINT},
        "states": [name for one in kept for _, name, *_ in one.rows()],
    }

    def write(path: Path) -> None:
        save(path, state, about)
        if file.is_file():
            file.replace(folder / PREVIOUS)

    write_atomically(file, write)
    clear(folder, running=True)


def clear(folder: Path, *, running: bool = False) -> None:
    """Removes what clients have kept and no checkpoint in a run's folder names, which a kill may leave too.

    Args:
        folder: Of the run.
        running: Leave other workers' files, which they read and remove themselves.
    """
    if (folder / STATES).is_dir():
        named = {name for checkpoint in (CHECKPOINT, PREVIOUS) for name in _named_by(folder / checkpoint)}
        for file in (folder / STATES).iterdir():
            if file.name.removesuffix(".safetensors") not in named and not (running and OF_WORKER in file.name):
                file.unlink()
        if not named and not running:
            (folder / STATES).rmdir()


def clear_finished(folder: Path) -> None:
    """Removes from the folder of a finished run what nobody needs any more: the checkpoint before the last one."""
    (folder / PREVIOUS).unlink(missing_ok=True)
    clear(folder)


def _named_by(checkpoint: Path) -> list[str]:
    """The versions of what clients keep that a checkpoint names; none if it is missing or damaged."""
    try:
        with _whole(checkpoint) as content:
            return json.loads(_header(content)["__metadata__"]["about"]).get("states", [])
    except (FileNotFoundError, Damaged):
        return []


def _kept(tree: Tree) -> Iterator[Any]:
    """What a store keeps in a state."""
    if isinstance(tree, Mapping) and not isinstance(tree, dict):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _kept(part)


def read_checkpoint(
    folder: Path, record: dict[str, Any], setup: Setup, fed: Federation, *, newest_only: bool = False
) -> Found:
    """The state to go on from and what the record says up to it; the initial ones where there is no checkpoint.

    Args:
        folder: Of the run.
        record: Its record.
        setup: Its set-up.
        fed: Its federation.
        newest_only: Whether the checkpoint before a damaged one does not do instead of it.

    Raises:
        UserError: If the checkpoints are damaged, or one is another run's, of another kind or of an older form.
    """
    first = setup.method.init(fed, setup.options)
    types = {kind.__name__: kind for kind in setup.method.state_types}
    types["kept"] = lambda *rows: fed.store.reopen(folder, rows)
    files = [folder / name for name in (CHECKPOINT, PREVIOUS) if (folder / name).is_file()]
    if not files:
        if (folder / OLD).is_file():
            raise UserError(
                f"the checkpoint '{folder / OLD}' has the form of an older version; this one does not read it; delete "
                "it to resume from the first round, or resume with that version."
            )
        return Found(first, {"rounds": [], "cost": None}, None)
    damage = []
    for file in files[:1] if newest_only else files:
        try:
            state, about = load(file, types, fed.device)
            if about.get("identity") != identity(record):
                raise UserError(
                    f"the checkpoint '{file}' is of another run (got identity {str(about.get('identity'))[:16]}, was "
                    f"{identity(record)[:16]}); put the run's own back, or delete it to go on from an earlier round."
                )
            for kept in _kept(state):
                kept.verify()
        except Damaged as error:
            damage.append(f"'{file}' is damaged ({error})")
            continue
        if differing := next(_differences(first, state, "state"), None):
            raise UserError(
                f"the checkpoint '{file}' holds a state of another kind ({differing}); "
                "delete it to resume from the first round, or start a new run."
            )
        note = f"the checkpoint {damage[0]}; going on from the one before it" if damage else None
        return Found(state, about["record"], note)
    raise UserError(
        f"the checkpoint {' and '.join(damage)}; {'delete it' if len(damage) == 1 else 'delete both'} to resume "
        "from the first round, or start a new run."
    )


def _differences(first: Tree, found: Tree, path: str) -> Iterator[str]:
    """Where a state has not the form of the initial one: types, names, shapes and dtypes.

    What is None or empty at first may become anything, as what clients keep; integers, such as ids, may become more.
    """
    if first is None or found is None or (isinstance(first, Mapping | tuple | list) and not first):
        return
    if isinstance(found, Mapping) and not isinstance(found, dict):  # what a store keeps
        return
    if isinstance(first, Tensor) and isinstance(found, Tensor):
        forms = [f"{NAMES[one.dtype]} {list(one.shape)}" for one in (found, first)]
        if found.dtype != first.dtype or (first.is_floating_point() and found.shape != first.shape):
            yield f"got {path} {forms[0]}, should be {forms[1]}"
    elif not any(isinstance(part, Tensor | Mapping | tuple | list) for part in (first, found)):
        return  # numbers and texts
    elif type(first) is not type(found):
        yield f"got {path} {type(found).__name__}, should be {type(first).__name__}"
    elif isinstance(first, Mapping):
        if odd := sorted(map(str, first.keys() ^ found.keys())):
            yield f"got {path} with other names, as {odd[0]}"
        else:
            for key, value in first.items():
                yield from _differences(value, found[key], f"{path}.{key}")
    elif isinstance(first, tuple | list):
        if len(first) != len(found):
            yield f"got {path} of {len(found)} parts, should be {len(first)}"
        else:
            names = getattr(first, "_fields", range(len(first)))
            for name, one, other in zip(names, first, found, strict=True):
                yield from _differences(one, other, f"{path}.{name}")


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@contextmanager
def _whole(path: Path, digest: str | None = None) -> Iterator[mmap.mmap]:
    """The bytes of a file, read only where they are looked at, once it is sure that it is whole.

    Raises:
        Damaged: If it is not, or is another one than that with the digest.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < DIGEST.stop:
            raise Damaged("it is cut")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _digest(content)
            for wanted in (content[DIGEST].decode(errors="replace"), digest or found):
                if found != wanted:
                    raise Damaged(f"its SHA-256 is {found[:16]}, was {wanted[:16]}")
            yield content


def _header(content: mmap.mmap) -> dict[str, Any]:
    """The header of a file that is whole."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _digest(content: mmap.mmap) -> str:
    """SHA-256 of a file with zeros in the digest's place."""
    digest = hashlib.sha256(content[: DIGEST.start] + b"0" * 64)
    with memoryview(content) as view, view[DIGEST.stop :] as rest:
        digest.update(rest)
    return digest.hexdigest()
