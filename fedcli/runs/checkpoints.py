"""The files that a run goes on from: its checkpoints, and the states that its clients keep from round to round.

A file has the form of safetensors. Its metadata are one JSON text, since the library does not keep the order of
several: the SHA-256 of the whole file, taken with zeros in its own place; the structure of the tree, see `to_names`;
and what the caller adds. Older files have a text for each of the three.

Each time that a client keeps a state, that is a version of it, which never changes. The versions kept last are in
memory. One is written to a file of its own when it is evicted from there or a checkpoint is to name it, and never
again. A method holds the versions of all clients as a `Kept`, a mapping from ids to states, and asks for those of the
round's clients. A version that no method holds is gone from memory, and its file too unless a checkpoint names it.
"""

import hashlib
import json
import math
import os
import re
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.core.trees import Tree, from_names, leaves, stored, to_names, tree_map
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.records import identity

SUFFIX = ".safetensors"
CHECKPOINT, PREVIOUS = f"checkpoint{SUFFIX}", f"checkpoint-before{SUFFIX}"
SELECTED = f"selected{SUFFIX}"  # the models of the best round, see fedcli/runs/models.py
STATES = "states"  # folder of what clients keep
OTHER = "-w"  # in the names of files of workers beside the first, 000001-3-w2, which no checkpoint names
METADATA = "fedcli"  # key of the JSON text
DIGEST = re.compile(rb"sha256\W+([0-9a-f]{64})")
ZEROS = b"0" * 64
IN_CHECKPOINT = ("rounds", "cost", "seconds_total", "peak_bytes")  # what a round adds to the record
SHARE, LONGEST = 0.05, 600.0  # of the time that checkpoints may take; seconds between two of them
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use of the machine's memory


def save(path: Path, tree: Tree, facts: Mapping[str, Any]) -> str:
    """Writes a tree of tensors, numbers and texts to a file, atomically, and returns its SHA-256 as it stands in it.

    NamedTuples are stored by class name, client states by the names of their versions, `facts` as JSON.
    """
    structure, tensors = to_names(tree)
    for name, tensor in tensors.items():  # the library refuses tensors that share memory
        tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    text = json.dumps({"sha256": ZEROS.decode(), "tree": structure, "about": dict(facts)})
    content = serialize(tensors, {METADATA: text})
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(ZEROS, digest.encode(), 1)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return digest


def read_verified(path: Path, digest: str | None = None) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Reads a file and checks its SHA-256 against `digest`, or against its embedded one if None.

    Returns:
        The structure of the tree, what else the file says, and the tensors by name.

    Raises:
        UserError: If a byte is not the one that was written, or it is another file or none.
    """
    content = path.read_bytes() if path.is_file() else b""
    match = DIGEST.search(content)
    actual = hashlib.sha256(content.replace(match[1], ZEROS, 1)).hexdigest() if match else "none"
    if match is None or actual != (digest or match[1].decode()):
        fault = f"'{path}' is missing or not as it was written (got SHA-256 {actual[:16]})"
        raise UserError(f"{fault}; put a copy back, or delete {CHECKPOINT} to resume from {PREVIOUS}.")
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    if METADATA in metadata:
        parts = json.loads(metadata[METADATA])
    else:
        parts = {name: json.loads(metadata[name]) for name in ("tree", "about")}
    return parts["tree"], parts["about"], deserialize(content)


def load(
    path: Path, types: Mapping[str, Callable], device: torch.device | str = "cpu", digest: str | None = None
) -> tuple[Tree, dict[str, Any]]:
    """Reads what `save` has written, and returns the tree and what else the file says.

    `types` maps names to NamedTuple classes of the tree; its entry `kept` rebuilds what a store keeps from its rows.

    Raises:
        UserError: See `read_verified`; also if a NamedTuple is none of the types.
    """
    structure, facts, tensors = read_verified(path, digest)
    for name, tensor in tensors.items():
        tensors[name] = tensor.clone().to(device)  # in memory of its own: rounding may depend on its alignment
    try:
        return from_names(structure, tensors, types), facts
    except (KeyError, TypeError) as error:  # a NamedTuple that is none of the types, or has other fields
        fault = f"the file '{path}' holds a state of another kind (got {error}; {', '.join(types)} are allowed)"
        raise UserError(f"{fault}; read it with the method that wrote it.") from None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Version:
    """A client's state as it was kept once."""

    name: str  # of its file, without the suffix; final once it is written
    nbytes: int
    digest: str | None = None  # of the file; None until it is written
    file: Path | None = None  # likewise
    state: Tree = None  # None where it is only in the file
    remove: weakref.finalize | None = None  # removes a file that no checkpoint names once nobody holds the version

    def write(self, folder: Path) -> None:
        """Writes the state to a file, if none has it."""
        if self.file is not None:
            return
        while (file := folder / f"{self.name}{SUFFIX}").exists():  # the client has kept two in this round
            self.name += "-again"
        folder.mkdir(exist_ok=True)
        self.digest = save(file, self.state, {})
        self.file, self.remove = file, weakref.finalize(self, file.unlink, missing_ok=True)
        self.remove.atexit = False


class Kept(UserDict):
    """What clients keep, by id in ascending order; a version that is only in its file is read when it is asked for."""

    def __init__(self, store: "Store", versions: dict[int, Version]):
        self._store, self.data = store, versions  # the one kept last at last

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.data))

    def __getitem__(self, client: int) -> Tree:
        """Reads a client's state, unless its file is damaged; its tensors are on any device, and not to be changed."""
        version = self.data[client]
        if version.state is not None:
            return version.state
        state, _ = load(version.file, self._store.types, digest=version.digest)
        if self.nbytes <= self._store.limit:
            version.state = state
        return state

    @property
    def nbytes(self) -> int:
        """The bytes of what all clients keep."""
        return sum(version.nbytes for version in self.data.values())

    def rows(self) -> list[tuple[int, str, int, str | None]]:
        """Names each client's version as a checkpoint does: client, file without suffix, bytes and SHA-256."""
        return [(client, version.name, version.nbytes, version.digest) for client, version in sorted(self.data.items())]

    def only(self, clients: Iterable[int]) -> "Kept":
        """Leaves out what all but these clients keep."""
        return Kept(self._store, {client: self.data[client] for client in self.data.keys() & set(clients)})


class Store:
    """Keeps versions of clients' states, those kept last in memory."""

    def __init__(self, memory: int | None, device: torch.device, types: Iterable[type]):
        """Makes an empty one, which has no folder yet, and holds everything in memory until it has.

        Args:
            memory: Bytes of states to hold; a quarter of the machine's where None.
            device: Of the run, where states stay as long as a quarter of its memory is free.
            types: The NamedTuple classes of states.
        """
        self._memory, self._device = memory, device
        self.types = {kind.__name__: kind for kind in types}
        self.limit = math.inf  # bytes in memory
        self._folder: Path | None = None  # of new files
        self._ending = ""  # of their names

    def open(self, folder: Path, worker: int = 0) -> None:
        """Lets states be written into a run's folder; of several workers checkpoints name the files of the first, 0."""
        self._folder, self._ending = folder / STATES, f"{OTHER}{worker}" if worker else ""
        self.limit = self._memory
        if self.limit is None:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            allowed = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
            self.limit = min(total, int(allowed) if allowed.isdecimal() else total) // 4

    def reopen(self, folder: Path) -> dict[str, Callable]:
        """Returns the types by which `load` reads a checkpoint in a folder: also `kept`, made of `Kept.rows`."""

        def kept(*rows: tuple[int, str, int, str]) -> Kept:
            versions = {}
            for client, name, nbytes, digest in rows:
                versions[client] = Version(name, nbytes, digest, folder / STATES / f"{name}{SUFFIX}")
            return Kept(self, versions)

        return {**self.types, "kept": kept}

    def keep(self, states: Mapping[int, Tree], new: dict[int, Tree], round: int) -> Kept:
        """Puts versions of new states, which are copied, in the place of those that their clients have kept so far.

        Evicts those kept first until the rest fits into memory, and writes the evicted ones that no file has.

        Raises:
            NonFiniteLoss: If a new one is infinite or NaN; it says in which round, from 0.
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
            versions[client] = Version(f"{client:06}-{round}{self._ending}", nbytes, state=copy)
        in_memory = [version for version in versions.values() if version.state is not None]
        held = sum(version.nbytes for version in in_memory)
        for version in in_memory:
            if held > self.limit:
                version.write(self._folder)
                version.state = None
                held -= version.nbytes
        return Kept(self, versions)


def refuse_non_finite(state: Any, round: int) -> None:
    """Raises NonFiniteLoss if a tensor of a state contains NaN or inf; `round` counts from 0."""
    for name, leaf in to_names(state)[1].items():
        if leaf.is_floating_point() and not leaf.isfinite().all():
            fault = f"'{name[1:]}' of the state is not finite in round {round + 1}"
            raise NonFiniteLoss(f"{fault}; a smaller --lr, or a smaller step of the server, usually helps.")


def is_due(number: int, every: int | None, rounds: int, seconds: float, since: float) -> bool:
    """Returns whether round `number` of `rounds` ends with a checkpoint: one in `every`, and the last.

    If `every` is None, they take at most 5 % of the time but come at least every ten minutes. The last one took
    `seconds`, 0 before the first, and ended `since` seconds ago.
    """
    if number + 1 == rounds:
        return True
    if every is None:
        return since >= min(seconds * (1 / SHARE - 1), LONGEST)
    return (number + 1) % every == 0


def write_checkpoint(folder: Path, record: dict[str, Any], state: Any) -> None:
    """Writes the state and all that the record knows by then; the checkpoint before it is kept.

    After a kill, checkpoint and record may be of different rounds, and only the checkpoint before may be there.
    """
    names = []
    for version in _versions(state):
        version.write(folder / STATES)
        names.append(version.name)
        if version.remove is not None:
            version.remove.detach()  # `clear` removes what no checkpoint names
    facts = {"identity": identity(record), "record": {key: record[key] for key in IN_CHECKPOINT}, "states": names}
    if (folder / CHECKPOINT).is_file():
        (folder / CHECKPOINT).replace(folder / PREVIOUS)
    save(folder / CHECKPOINT, state, facts)
    clear(folder)


def clear(folder: Path, *files: str, at_rest: bool = False) -> None:
    """Removes files of a run, and what clients have kept and no checkpoint names, which a kill may leave too.

    Where the run is at rest, other workers' files go as well.
    """
    for file in files:
        (folder / file).unlink(missing_ok=True)
    names = set()
    for checkpoint in (folder / CHECKPOINT, folder / PREVIOUS):
        with suppress(UserError):  # there is none, or it is damaged
            names.update(read_verified(checkpoint)[1]["states"])
    for file in (folder / STATES).glob("*"):
        if file.name.removesuffix(SUFFIX) not in names and (at_rest or OTHER not in file.name):
            file.unlink(missing_ok=True)  # its worker may have removed it
    if at_rest:
        with suppress(OSError):  # it is not empty, or not there
            (folder / STATES).rmdir()


def clear_finished(folder: Path, record: dict[str, Any]) -> None:
    """Removes from the folder of a finished run the checkpoint before the last, and models that are not the best."""
    is_last = record["summary"]["selected_round"] == record["rounds"][-1]["round"]  # then the last checkpoint has them
    clear(folder, PREVIOUS, *([SELECTED] if is_last else []), at_rest=True)


def read_checkpoint(folder: Path, record: dict[str, Any], setup: Setup, fed: Federation) -> tuple[Any, dict[str, Any]]:
    """Reads the newest checkpoint of a run; a damaged one is refused, never skipped.

    Returns:
        The method's state, and what the record says up to it; the initial ones where there is none.

    Raises:
        UserError: If the checkpoint, or what a client has kept by then, is damaged, another run's or of another kind.
    """
    for file in (folder / CHECKPOINT, folder / PREVIOUS):
        if file.is_file():
            state, facts = load(file, fed.store.reopen(folder), fed.device)
            if facts["identity"] != identity(record):
                fault = f"the checkpoint '{file}' is of another run (got identity {facts['identity'][:16]})"
                raise UserError(f"{fault}; put the run's own back, or delete it to go on from an earlier round.")
            for version in _versions(state):
                read_verified(version.file, version.digest)
            return state, facts["record"]
    return setup.method.init(fed, setup.options), {"rounds": [], "cost": None}


def _versions(state: Any) -> list[Version]:
    """Returns what clients keep of a method's state."""
    return [version for kept in stored(state).values() for version in kept.data.values()]
