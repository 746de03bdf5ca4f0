"""What clients keep from round to round: in memory as far as it may be, the rest in files of the run's folder.

Each time that a client keeps a state, that is a version of it, which never changes. It is written to a file of its own
when the memory is wanted for another or a checkpoint is to name it, and never again. A method holds the versions of all
clients as a `Kept`, a mapping from ids to states, and asks for those of the round's clients.
"""

import ctypes
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcli.core.trees import Tree, leaves, stored, tree_map
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.runs.checkpoints import OF_WORKER, STATES, Damaged, load, save, verify
from fedcli.runs.finite import refuse_non_finite

MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # gives free memory back to the system, under glibc
LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use of the machine's memory


class Unkept(OSError):
    """The disk does not take a client's state."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Version:
    """A client's state as it was kept once."""

    client: int
    name: str  # of its file, without the suffix
    nbytes: int
    digest: str | None  # of the file; None until it is written


class Store:
    """Holds versions of clients' states, those that were used last in memory."""

    def __init__(self, memory: int | None, num_clients: int, device: torch.device, types: Iterable[type]):
        """Makes an empty one; nothing is written before `open`.

        Args:
            memory: Bytes that may be held; a quarter of the machine's where None.
            num_clients: Size of the population.
            device: Of the run.
            types: The NamedTuple classes of states.
        """
        self._limit = _machine_memory() // 4 if memory is None else memory
        self._num_clients, self._device = num_clients, device
        self._place: torch.device | None = None  # where states are held, which the first ones decide
        self._types = {kind.__name__: kind for kind in types}
        self._folder: Path | None = None
        self._identity: str | None = None  # of the run; None as long as nothing may be written
        self._mark = ""  # at the end of the names of new versions
        self._states: OrderedDict[str, Tree] = OrderedDict()  # in memory, by name of the version, the last used last
        self._bytes = 0  # of them
        self._in_hand = 0  # bytes that a method has of the states that it kept last, beside their copies here
        self._versions: weakref.WeakValueDictionary[str, Version] = weakref.WeakValueDictionary()
        self._unnamed: set[str] = set()  # written, and not for a checkpoint
        self._dead: list[str] = []  # of these, those that nobody holds any more

    def open(self, folder: Path, identity: str, worker: int = 0) -> None:
        """Lets states be written into the folder of a run that has this identity.

        Of several workers of the run each writes its own files, and the first one's are those that a checkpoint names.
        """
        self._folder, self._identity, self._mark = folder, identity, f"{OF_WORKER}{worker}" if worker else ""

    def keep(self, states: Mapping[int, Tree], new: dict[int, Tree], round: int) -> "Kept":
        """Makes versions of new states, which are copied.

        Args:
            states: Those so far, by client.
            new: The new ones, which take the place of others.
            round: In which they are kept, from 0.

        Raises:
            NonFiniteLoss: If a new one is infinite or NaN.
            Unkept: If the disk does not take them.
        """
        refuse_non_finite({"clients": new}, {}, round)
        while self._dead:
            self._file(self._dead.pop()).unlink(missing_ok=True)
        if isinstance(states, Kept):
            versions = dict(states.versions)
        else:  # a method's own at the start
            versions, new = {}, {**states, **new}
        self._in_hand = sum(leaf.nbytes for leaf in leaves(new))
        for client, state in new.items():
            versions[client] = self._take(client, state, round)
        return Kept(self, dict(sorted(versions.items())))

    def reopen(self, folder: Path, rows: Iterable[tuple[int, str, int, str]]) -> "Kept":
        """Finds the versions that a checkpoint in a folder names; see `Kept.rows`."""
        self._folder = folder
        return Kept(self, {client: self._track(Version(client, *about)) for client, *about in rows})

    def read(self, version: Version) -> Tree:
        """Reads a version; its tensors are on the device or the host, and not to be changed.

        Raises:
            UserError: If its file is not what was written.
        """
        if version.name in self._states:
            self._states.move_to_end(version.name)
            return self._states[version.name]
        file = self._file(version.name)
        try:
            state, _ = load(file, self._types, digest=version.digest)
        except (OSError, Damaged) as error:
            raise UserError(
                f"what client {version.client} keeps in '{file}' cannot be read ({error}); 'fedcli resume' goes on "
                "from the checkpoint before, if that is whole."
            ) from error
        if self._fits(version.nbytes):  # room is not made: of all clients in turn none would be left
            self._hold(version, state)
        return state

    def write(self, versions: Iterable[Version]) -> None:
        """Writes those versions that have not been written, for a checkpoint that names them."""
        for version in versions:
            if version.digest is None:
                self._write(version, self._states[version.name])
            self._unnamed.discard(version.name)
        self.settle()

    def settle(self) -> None:
        """Gives free memory back to the system: it lies in pieces between the states that are held."""
        if MALLOC_TRIM is not None and self._in_hand:
            MALLOC_TRIM(0)

    def verify(self, versions: Iterable[Version]) -> None:
        """Reads the files of versions through.

        Raises:
            Damaged: If one is not what was written.
        """
        for version in versions:
            file = self._file(version.name)
            if not file.is_file():
                raise Damaged(f"it names '{file}', which is missing")
            try:
                verify(file, version.digest)
            except Damaged as error:
                raise Damaged(f"it names '{file}', {error}") from error

    def _file(self, name: str) -> Path:
        return self._folder / STATES / f"{name}.safetensors"

    def _take(self, client: int, state: Tree, round: int) -> Version:
        """Makes a version, which is held or written at once."""
        nbytes = sum(leaf.nbytes for leaf in leaves(state))
        name, again = f"{client:06}-{round}{self._mark}", 0
        while name in self._versions or name in self._dead:
            name, again = f"{client:06}-{round}-{again + 1}{self._mark}", again + 1
        version = self._track(Version(client, name, nbytes, None))
        self._make_room(nbytes)
        if self._fits(nbytes) or self._identity is None:
            place = self._find_place(nbytes)
            self._hold(version, tree_map(lambda leaf: leaf.to(place, copy=True).contiguous(), state))
        else:
            self._write(version, state)
        return version

    def _find_place(self, nbytes: int) -> torch.device:
        """Where states are held: on the device if the whole population's fit into half of its memory."""
        if self._place is None:
            self._place = self._device
            if self._device.type == "cuda":
                room = torch.cuda.mem_get_info(self._device)[0] / 2
                self._place = self._device if nbytes * self._num_clients <= room else torch.device("cpu")
        return self._place

    def _track(self, version: Version) -> Version:
        self._versions[version.name] = version
        weakref.finalize(version, self._dropped, version.name, version.nbytes).atexit = False
        return version

    def _dropped(self, name: str, nbytes: int) -> None:
        """Takes note that nobody holds a version any more."""
        self._forget(name, nbytes)
        if name in self._unnamed:  # removed later by the run itself: a process that it has forked comes here too
            self._unnamed.remove(name)
            self._dead.append(name)

    def _hold(self, version: Version, state: Tree) -> None:
        self._states[version.name] = state
        self._bytes += version.nbytes

    def _forget(self, name: str, nbytes: int) -> None:
        if self._states.pop(name, None) is not None:
            self._bytes -= nbytes

    def _fits(self, nbytes: int) -> bool:
        return self._bytes + self._in_hand + nbytes <= self._limit

    def _make_room(self, nbytes: int) -> None:
        """Writes and forgets states, the one used last at last, until so many bytes may be held, if that can be."""
        while self._states and not self._fits(nbytes):
            version = self._versions[next(iter(self._states))]
            if version.digest is None:
                if self._identity is None:
                    return
                self._write(version, self._states[version.name])
            self._forget(version.name, version.nbytes)

    def _write(self, version: Version, state: Tree) -> None:
        """Writes a state to the file of its version."""
        about = {"identity": self._identity, "client": version.client}
        file, digests = self._file(version.name), []
        try:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, lambda path: digests.append(save(path, state, about)))
        except OSError as error:
            raise Unkept(error.errno, error.strerror, str(file)) from error
        [version.digest] = digests
        self._unnamed.add(version.name)


class Kept(Mapping[int, Tree]):
    """What clients keep, by id in ascending order; a state is read when it is asked for."""

    def __init__(self, store: Store, versions: dict[int, Version]):
        self.versions, self._store = versions, store

    def __getitem__(self, client: int) -> Tree:
        return self._store.read(self.versions[client])

    def __contains__(self, client: object) -> bool:
        return client in self.versions

    def __iter__(self) -> Iterator[int]:
        return iter(self.versions)

    def __len__(self) -> int:
        return len(self.versions)

    def write(self) -> None:
        """Writes what has not been written, for a checkpoint."""
        self._store.write(self.versions.values())

    def verify(self) -> None:
        """See `Store.verify`."""
        self._store.verify(self.versions.values())

    def rows(self) -> list[tuple[int, str, int, str | None]]:
        """Names each client's version as a checkpoint does: client, file without suffix, bytes and SHA-256."""
        return [(one.client, one.name, one.nbytes, one.digest) for one in self.versions.values()]

    def only(self, clients: Iterable[int]) -> "Kept":
        """Leaves out what all but these clients keep."""
        return Kept(self._store, {client: self.versions[client] for client in clients if client in self.versions})


def trimmed(state: Any, clients: Iterable[int]) -> Any:
    """Leaves out of a server's state what all but these clients keep."""
    parts = {name: kept.only(sorted(map(int, clients))) for name, kept in stored(state).items()}
    return state._replace(**parts) if parts else state


def _machine_memory() -> int:
    """The machine's memory, or the part of it that this container may use."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = LIMIT.read_text().strip() if LIMIT.is_file() else "max"
    return min(found, int(allowed)) if allowed.isdecimal() else found
