"""The files that a run goes on from: its checkpoints, and the states that its clients keep from round to round.

A file has the form of safetensors. Its metadata are one JSON text, since the library does not keep the order of
several: the SHA-256 of the whole file, taken with zeros in its place; the structure of the tree, see `to_names`; and
what the caller adds. Older files have a text for each of the three.

A state that a client keeps is a version and never changes. It is written once, to a file of its own, when it is evicted
from memory or a checkpoint names it. A method holds the versions of all clients as a `Kept`, a mapping from ids to
states. A version that no method holds is freed, and its file removed unless a checkpoint names it.
"""

import hashlib
import json
import os
import re
import shutil
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors

from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.core.trees import Tree, from_names, leaves, stored, to_names, tree_map
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.records import identity

SUFFIX = ".safetensors"
CHECKPOINT, PREVIOUS = f"checkpoint{SUFFIX}", f"checkpoint-before{SUFFIX}"
SELECTED = f"selected{SUFFIX}"  # the models of the best round, see fedcli/runs/models.py
STATES = "states"  # folder of what clients keep; of the workers beside the first, states-1, states-2, ...
DIGEST = re.compile(rb"sha256\W+([0-9a-f]{64})")
ZEROS = b"0" * 64
SHARE, LONGEST = 0.05, 600.0  # of the time that checkpoints may take; seconds between two of them
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use of the machine's memory


def save(path: Path, tree: Tree, facts: Mapping[str, Any]) -> str:
    """Writes a tree, see `to_names`, and `facts` to a file, atomically, and returns its SHA-256 as it stands in it."""
    structure, tensors = to_names(tree)
    text = json.dumps({"sha256": ZEROS.decode(), "tree": structure, "about": dict(facts)})
    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}  # may share no memory
    content = safetensors.save(tensors, {"fedcli": text})
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(ZEROS, digest.encode(), 1)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return digest


def read_verified(path: Path, digest: str | None = None) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Reads a file whose SHA-256 is `digest`, or the embedded one if None: structure of the tree, facts and tensors.

    Raises:
        UserError: If the file is missing, damaged or another one.
    """
    content = path.read_bytes() if path.is_file() else b""
    match = DIGEST.search(content)
    actual = match and hashlib.sha256(content.replace(match[1], ZEROS, 1)).hexdigest()
    if match is None or actual != (digest or match[1].decode()):
        raise UserError(f"'{path}' is missing or damaged; restore it, or delete {CHECKPOINT} to go on from {PREVIOUS}.")
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    parts = {name: json.loads(text) for name, text in metadata.items() if name != "sha256"}
    parts = parts.get("fedcli", parts)
    return parts["tree"], parts["about"], safetensors.load(content)


def load(
    path: Path, types: Mapping[str, Callable], device: torch.device | str = "cpu", digest: str | None = None
) -> tuple[Tree, dict[str, Any]]:
    """Reads the tree and the facts that `save` has written; for `types` see `from_names`.

    Raises:
        UserError: See `read_verified`; also if a NamedTuple is none of the types.
    """
    structure, facts, tensors = read_verified(path, digest)
    for name, tensor in tensors.items():  # one by one, since all twice may not fit into memory
        tensors[name] = tensor.clone().to(device)  # in memory of its own: rounding may depend on its alignment
    try:
        return from_names(structure, tensors, types), facts
    except (KeyError, TypeError) as error:  # a NamedTuple that is none of the types, or has other fields
        raise UserError(f"'{path}' holds another kind of state (got {error}); use the method that wrote it.") from None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Version:
    """A client's state as it was kept once."""

    file: Path  # its name alone until it is written
    nbytes: int
    digest: str | None = None  # of the file; None until it is written
    state: Tree = None  # None where it is only in the file
    remove: weakref.finalize | None = None  # of the file, once nobody holds the version and no checkpoint names it

    def write(self, folder: Path) -> None:
        """Writes the state to a file, if none has it."""
        if self.digest is None:
            self.file = folder / self.file.name
            while self.file.exists():  # the client has kept two in this round
                self.file = self.file.with_stem(f"{self.file.stem}-again")
            folder.mkdir(exist_ok=True)
            self.digest = save(self.file, self.state, {})
            self.remove = weakref.finalize(self, self.file.unlink, missing_ok=True)
            self.remove.atexit = False


class Kept(UserDict):
    """The clients' states by id, in ascending order; one that is not in memory is read from its file."""

    def __init__(self, store: "Store", versions: dict[int, Version]):
        self._store, self.data = store, versions  # in the order in which they were kept

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.data))

    def __getitem__(self, client: int) -> Tree:
        """Returns a client's state, whose tensors are on any device and must not be changed."""
        version = self.data[client]
        if version.state is not None:
            return version.state
        state, _ = load(version.file, self._store.types, digest=version.digest)
        if self.nbytes <= self._store.limit:
            version.state = state
        return state

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(version.nbytes for version in self.data.values())

    def rows(self) -> list[tuple[int, str, int, str | None]]:
        """Names the versions as a checkpoint does: client, file without suffix, bytes and SHA-256 of each."""
        return [(client, each.file.stem, each.nbytes, each.digest) for client, each in sorted(self.data.items())]

    def only(self, clients: Iterable[int]) -> "Kept":
        """Leaves out the states of all other clients."""
        return Kept(self._store, {client: self.data[client] for client in self.data.keys() & set(clients)})


class Store:
    """Keeps versions of clients' states, those kept last in memory.

    Attributes:
        folder: Of files for what exceeds the memory; None for no files.
    """

    def __init__(self, memory: int | None, device: torch.device, types: Iterable[type]):
        """Makes a store without a folder.

        Args:
            memory: Bytes of states in memory; a quarter of the machine's if None.
            device: Of the run, where states stay while a quarter of its memory is free.
            types: The NamedTuple classes of states.
        """
        self.types, self.folder, self._device = {kind.__name__: kind for kind in types}, None, device
        if memory is None:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            allowed = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
            memory = min(total, int(allowed) if allowed.isdecimal() else total) // 4
        self.limit = memory

    def reopen(self, folder: Path) -> dict[str, Callable]:
        """Returns the types by which `load` reads a checkpoint in a folder; `kept` takes `Kept.rows`."""

        def kept(*rows: tuple[int, str, int, str]) -> Kept:
            versions = {client: Version(folder / STATES / f"{name}{SUFFIX}", *facts) for client, name, *facts in rows}
            return Kept(self, versions)

        return {**self.types, "kept": kept}

    def keep(self, states: Mapping[int, Tree], new: dict[int, Tree], round: int) -> Kept:
        """Returns the states with copies of new ones, and evicts the oldest to files until the rest fits into memory.

        Raises:
            NonFiniteLoss: If a new one of `round`, from 0, has a value that is infinite or NaN.
            OSError: If the disk does not take them.
        """
        refuse_non_finite({"clients": new}, round)
        if isinstance(states, Kept):
            versions = {client: version for client, version in states.data.items() if client not in new}
        else:  # a method's own at the start
            versions, new = {}, {**states, **new}
        home = self._device
        if home.type == "cuda":
            free, total = torch.cuda.mem_get_info(home)
            home = home if 4 * free > total else torch.device("cpu")
        for client, state in new.items():
            copy = tree_map(lambda leaf: leaf.to(home, copy=True).contiguous(), state)
            nbytes = sum(leaf.nbytes for leaf in leaves(copy))
            versions[client] = Version(Path(f"{client:06}-{round}{SUFFIX}"), nbytes, state=copy)
        excess = sum(version.nbytes for version in versions.values() if version.state is not None) - self.limit
        for version in versions.values() if self.folder else ():
            if excess > 0 and version.state is not None:
                version.write(self.folder)
                version.state = None
                excess -= version.nbytes
        return Kept(self, versions)


def refuse_non_finite(state: Any, round: int) -> None:
    """Raises NonFiniteLoss if a tensor of a state has NaN or inf; `round` counts from 0."""
    for name, leaf in to_names(state)[1].items():
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise NonFiniteLoss(f"'{name[1:]}' of the state is not finite in round {round + 1}; use a smaller --lr.")


def is_due(number: int, every: int | None, rounds: int, seconds: float, since: float) -> bool:
    """Returns whether round `number` of `rounds` ends with a checkpoint: one in `every`, and the last.

    If `every` is None, they take at most 5 % of the time but come at least every ten minutes. The last one took
    `seconds`, 0 before the first, and ended `since` seconds ago.
    """
    is_time = since >= min(seconds * (1 / SHARE - 1), LONGEST) if every is None else (number + 1) % every == 0
    return is_time or number + 1 == rounds


def write_checkpoint(folder: Path, record: dict[str, Any], state: Any) -> None:
    """Writes state and rounds, and keeps the checkpoint before, which may be the only one after a kill."""
    versions = _versions(state)
    for version in versions:
        version.write(folder / STATES)
        if version.remove is not None:
            version.remove.detach()  # `clear` removes what no checkpoint names
    facts = {
        "identity": identity(record),
        # What a round adds to the record.
        "record": {key: record[key] for key in ("rounds", "cost", "seconds_total", "peak_bytes")},
        "states": [version.file.stem for version in versions],
    }
    if (folder / CHECKPOINT).is_file():
        (folder / CHECKPOINT).replace(folder / PREVIOUS)
    save(folder / CHECKPOINT, state, facts)
    clear(folder)


def clear(folder: Path, *files: str, at_rest: bool = False) -> None:
    """Removes files of a run, client states that no checkpoint names, and, `at_rest`, those of other workers."""
    for file in files:
        (folder / file).unlink(missing_ok=True)
    names = set()
    for checkpoint in (folder / CHECKPOINT, folder / PREVIOUS):
        with suppress(UserError):  # there is none, or it is damaged
            names.update(read_verified(checkpoint)[1]["states"])
    for file in (folder / STATES).glob("*"):
        if file.stem not in names:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty, or not there
        (folder / STATES).rmdir()
    for others in folder.glob(f"{STATES}-*") if at_rest else ():
        shutil.rmtree(others, ignore_errors=True)  # its worker may be removing files too


def clear_finished(folder: Path, record: dict[str, Any]) -> None:
    """Removes from a finished run's folder the checkpoint before the last, and models that are not the best."""
    is_last = record["summary"]["selected_round"] == record["rounds"][-1]["round"]  # then the last checkpoint has them
    clear(folder, PREVIOUS, *([SELECTED] if is_last else []), at_rest=True)


def read_checkpoint(folder: Path, record: dict[str, Any], setup: Setup, fed: Federation) -> tuple[Any, dict[str, Any]]:
    """Returns a run's state and its part of the record at the newest checkpoint; the initial ones without any.

    Raises:
        UserError: If the checkpoint, or a client's state that it names, is damaged, another run's or of another kind.
    """
    for file in (folder / CHECKPOINT, folder / PREVIOUS):
        if file.is_file():
            state, facts = load(file, fed.store.reopen(folder), fed.device)
            if facts["identity"] != identity(record):
                raise UserError(f"'{file}' is of another run; restore it, or delete it to go on from an earlier round.")
            for version in _versions(state):
                read_verified(version.file, version.digest)
            return state, facts["record"]
    return setup.method.init(fed, setup.options), {"rounds": [], "cost": None}


def _versions(state: Any) -> list[Version]:
    """Returns the versions in a method's state."""
    return [version for kept in stored(state).values() for version in kept.data.values()]
