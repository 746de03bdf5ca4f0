"""What clients keep from round to round: the states used last in memory, the others in files of the run's folder.

Each time that a client keeps a state, that is a version of it, which never changes. It is written to a file of its own
when it is evicted from memory or a checkpoint is to name it, and never again. A method holds the versions of all
clients as a `Kept`, a mapping from ids to states, and asks for those of the round's clients. A version that no method
holds is gone from memory, and its file too unless a checkpoint names it.
"""

import ctypes
import math
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcli.core.federation import NonFiniteLoss
from fedcli.core.trees import Tree, leaves, to_names, tree_map
from fedcli.errors import UserError
from fedcli.runs.checkpoints import STATES, STATES_OF_WORKER, SUFFIX, Damaged, load, save, verify

MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # under glibc
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use of the machine's memory


class Unkept(OSError):
    """The disk does not take a client's state."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Version:
    """A client's state as it was kept once."""

    client: int
    name: str  # of its file, without the suffix; final once it is written
    nbytes: int
    digest: str | None = None  # of the file; None until it is written
    file: Path | None = None  # likewise
    state: Tree = None  # None where it is only in the file
    remove: weakref.finalize | None = None  # removes a file that no checkpoint names once nobody holds the version


class Store:
    """Keeps versions of clients' states, an LRU of them in memory."""

    def __init__(self, memory: int | None, num_clients: int, device: torch.device, types: Iterable[type]):
        """Makes an empty one, which holds `memory` bytes, a quarter of the machine's where None, and has no folder yet.

        `types` are the NamedTuple classes of states.
        """
        self._limit = _machine_memory() // 4 if memory is None else memory
        self._num_clients, self._device = num_clients, device
        self._home: torch.device | None = None  # of states in memory: the device if the population's fill half of it
        self._types = {kind.__name__: kind for kind in types}
        self._folder: Path | None = None  # of new files
        self._cache: weakref.WeakKeyDictionary[Version, None] = weakref.WeakKeyDictionary()  # last used last
        self._in_hand = 0  # bytes that a method has of the states that it kept last, beside their copies here

    def open(self, folder: Path, worker: int = 0) -> None:
        """Lets states be written into a run's folder; of several workers checkpoints name the files of the first, 0."""
        self._folder = folder / (f"{STATES_OF_WORKER}{worker}" if worker else STATES)

    def reopen(self, folder: Path) -> dict[str, Callable]:
        """Returns the types by which `load` reads a checkpoint in a folder: also `kept`, made of `Kept.rows`."""

        def kept(*rows: tuple[int, str, int, str]) -> Kept:
            versions = {}
            for client, name, nbytes, digest in rows:
                versions[client] = Version(client, name, nbytes, digest, folder / STATES / f"{name}{SUFFIX}")
            return Kept(self, versions)

        return {**self._types, "kept": kept}

    def keep(self, states: Mapping[int, Tree], new: dict[int, Tree], round: int) -> "Kept":
        """Puts versions of new states, which are copied, in the place of those that their clients have kept so far.

        Raises:
            NonFiniteLoss: If a new one is infinite or NaN; it says in which round, from 0.
            Unkept: If the disk does not take them.
        """
        refuse_non_finite({"clients": new}, {}, round)
        if isinstance(states, Kept):
            versions = dict(states.data)
        else:  # a method's own at the start
            versions, new = {}, {**states, **new}
        self._in_hand = sum(leaf.nbytes for leaf in leaves(new))
        for client, state in new.items():
            version = Version(client, f"{client:06}-{round}", sum(leaf.nbytes for leaf in leaves(state)))
            if self._home is None:
                of_all = version.nbytes * self._num_clients
                on_host = self._device.type == "cuda" and 2 * of_all > torch.cuda.mem_get_info(self._device)[0]
                self._home = torch.device("cpu") if on_host else self._device
            version.state = tree_map(lambda leaf: leaf.to(self._home, copy=True).contiguous(), state)
            self._cache[version] = None
            self._evict()
            versions[client] = version
        return Kept(self, dict(sorted(versions.items())))

    def read(self, version: Version) -> Tree:
        """Reads a version, unless its file is damaged; its tensors are on any device, and not to be changed."""
        state = version.state
        if state is None:
            try:
                state, _ = load(version.file, self._types, digest=version.digest)
            except (OSError, Damaged) as error:
                raise UserError(
                    f"what client {version.client} keeps in '{version.file}' cannot be read ({error}); 'fedcli resume' "
                    "goes on from the checkpoint before, if that is whole."
                ) from error
            if version.nbytes > self._room():  # evicts none: when all clients are read in turn, none would stay
                return state
        version.state = state
        self._cache.pop(version, None)
        self._cache[version] = None
        return state

    def settle(self) -> None:
        """Gives free memory between the states back to the system: 400 MB after three rounds of 100 clients."""
        if MALLOC_TRIM is not None and self._in_hand:
            MALLOC_TRIM(0)

    def _room(self) -> float:
        """Returns how many bytes may be held beside those that are; any number as long as nothing may be written."""
        if self._folder is None:
            return math.inf
        return self._limit - self._in_hand - sum(version.nbytes for version in self._cache)

    def _evict(self) -> None:
        """Evicts least-recently-used states until the limit holds; spills those that no file has."""
        room = self._room()
        for version in list(self._cache):
            if room >= 0:
                return
            room += version.nbytes
            if version.file is None:
                self.spill(version)
            version.state = None
            del self._cache[version]

    def spill(self, version: Version) -> None:
        """Writes a state to a file, which is removed when nobody holds the version, unless a checkpoint names it."""
        while (file := self._folder / f"{version.name}{SUFFIX}").exists():  # the client has kept two in this round
            version.name += "-again"
        try:
            self._folder.mkdir(exist_ok=True)
            version.digest = save(file, version.state, {"client": version.client})
        except OSError as error:
            raise Unkept(error.errno, error.strerror, str(file)) from error
        version.file = file
        version.remove = weakref.finalize(version, file.unlink, missing_ok=True)
        version.remove.atexit = False


class Kept(UserDict):
    """What clients keep, by id in ascending order: versions, which are read when they are asked for."""

    def __init__(self, store: Store, versions: dict[int, Version]):
        self.data, self._store = versions, store

    def __getitem__(self, client: int) -> Tree:
        return self._store.read(self.data[client])

    def write(self) -> None:
        """Writes what has not been written, for a checkpoint."""
        for version in self.data.values():
            if version.file is None:
                self._store.spill(version)
            if version.remove is not None:
                version.remove.detach()  # checkpoints remove what none of them names

    def verify(self) -> None:
        """Reads all files through; raises `Damaged` if one is missing or not what was written."""
        for version in self.data.values():
            try:
                verify(version.file, version.digest)
            except Damaged as error:
                raise Damaged(f"it names '{version.file}': {error}") from error

    def rows(self) -> list[tuple[int, str, int, str | None]]:
        """Names each client's version as a checkpoint does: client, file without suffix, bytes and SHA-256."""
        return [(version.client, version.name, version.nbytes, version.digest) for version in self.data.values()]

    def only(self, clients: Iterable[int]) -> "Kept":
        """Leaves out what all but these clients keep."""
        return Kept(self._store, {client: self.data[client] for client in sorted(self.data.keys() & set(clients))})


def refuse_non_finite(state: Any, before: Any, round: int) -> None:
    """Refuses floating-point tensors that are not finite, of those that a round, from 0, has made of the one before."""
    checked, finite = {id(leaf) for leaf in leaves(before)}, {}
    for name, leaf in to_names(state)[1].items():
        if leaf.is_floating_point() and id(leaf) not in checked:
            finite[name] = torch.isfinite(leaf).all()
    for name, flag in finite.items():  # which waits for the device, once all is asked
        if not flag:
            raise NonFiniteLoss(
                f"'{name[1:]}' of the state is not finite in round {round + 1}; a smaller --lr, or a smaller step of "
                "the server, usually helps."
            )


def _machine_memory() -> int:
    """Returns the bytes of the machine's memory, or of the part of it that this container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return min(total, int(limit)) if limit.isdecimal() else total
