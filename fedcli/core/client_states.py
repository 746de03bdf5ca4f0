"""What clients keep from round to round: in memory as far as it may be, else in files.

A state that a client keeps is a version and never changes. It is written once, to a file of its own, when it is evicted
from memory or a checkpoint names it. A method holds the versions of all clients as `StoredClientStates`, a mapping from
ids to states. A version that no method holds is freed, and its file removed unless a checkpoint names it.
"""

import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.core.clients import Model
from fedcli.core.optimizers import AdamState
from fedcli.core.tree_files import SUFFIX, load_tree, save_tree
from fedcli.core.trees import StoredStates, Tree, leaves, to_device, to_names, tree_map
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.files import refuse_lost, remove
from fedcli.run_files import RESTORE_CHECKPOINT, STATES

STATE_FILE = re.compile(rf"\d{{6,}}-\d+(-again)*{re.escape(SUFFIX)}")  # see `Version.write`
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use of the machine's memory


@dataclass(eq=False, slots=True, weakref_slot=True)
class Version:
    """A state of a client, which never changes."""

    file: Path  # its name alone until it is written
    nbytes: int
    digest: str | None = None  # the file's; None until it is written
    state: Tree = None  # None where it is only in the file
    remove: weakref.finalize | None = None  # removes the file once nobody holds the version and no checkpoint names it

    def write(self, folder: Path) -> None:
        """Writes the state to a file, if none has it."""
        if self.digest is None:
            self.file = folder / self.file.name
            while self.file.exists():  # of another version of this round
                self.file = self.file.with_stem(f"{self.file.stem}-again")
            refuse_lost(folder)
            folder.mkdir(exist_ok=True)
            self.digest = save_tree(self.file, self.state, {})
            self.remove = weakref.finalize(self, _remove, self.file)
            self.remove.atexit = False


def _remove(file: Path) -> None:
    """Removes the file of a version, unless the run has lost its folder, as the next write says."""
    with suppress(UserError):
        remove(file)


class StateRow(NamedTuple):
    """What a checkpoint names a client's state by."""

    client: int
    name: str  # of the file, without its suffix
    nbytes: int
    digest: str | None  # SHA-256 of the file; None until it is written


class StoredClientStates(StoredStates):
    """The clients' states by id, in ascending order; one that is not in memory is read from its file."""

    def __init__(self, store: "Store", versions: dict[int, Version]):
        self._store = store
        self.versions = versions  # in the order in which they were stored; never changed
        self.nbytes = sum(version.nbytes for version in versions.values())  # of all states

    def __len__(self) -> int:
        return len(self.versions)

    def __contains__(self, client: object) -> bool:
        return client in self.versions

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.versions))

    def __getitem__(self, client: int) -> Tree:
        """Returns a client's state, whose tensors are on any device and must not be changed."""
        version = self.versions[client]
        if version.state is not None:
            return version.state
        state = load_tree(version.file, self._store.types, digest=version.digest).tree
        if self.nbytes <= self._store.limit:
            version.state = state
        return state

    def is_in_memory(self, client: int) -> bool:
        """Says whether a client's state is the same tensors each time it is asked for, and not read from its file."""
        return self.versions[client].state is not None or self.nbytes <= self._store.limit

    def read_verified(self) -> Iterator[tuple[int, Tree]]:
        """Reads clients and states, from their files where they have been written, one after the other.

        Raises:
            UserError: If a file is missing, damaged or another one, or its size is not the one that was written down.
        """
        for client, version in self.versions.items():
            state = version.state
            if version.digest is not None:
                state = load_tree(version.file, self._store.types, digest=version.digest).tree
            nbytes = sum(leaf.nbytes for leaf in leaves(state) if isinstance(leaf, torch.Tensor))
            if nbytes != version.nbytes:
                raise UserError(f"'{version.file}' holds {nbytes} bytes (was {version.nbytes}); {RESTORE_CHECKPOINT}.")
            yield client, state

    def rows(self) -> list[tuple]:
        """Returns the `StateRow` of each client's state."""
        rows: list[tuple] = []
        for client, version in sorted(self.versions.items()):
            rows.append(StateRow(client, version.file.stem, version.nbytes, version.digest))
        return rows

    def select(self, clients: Iterable[int]) -> "StoredClientStates":
        """Returns the states of some clients alone."""
        wanted = self.versions.keys() & set(clients)
        return StoredClientStates(self._store, {client: self.versions[client] for client in wanted})


def machine_memory() -> int:
    """Returns the bytes of memory of this machine, or those that a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = CGROUP_LIMIT.read_text(encoding="utf-8").strip() if CGROUP_LIMIT.is_file() else ""
    return min(total, int(allowed)) if allowed.isdecimal() else total


def types_by_name(state_types: Iterable[type]) -> dict[str, Callable]:
    """Returns the NamedTuple classes that a state may hold, by name: a method's own, and those it has of the core."""
    return {kind.__name__: kind for kind in (Model, AdamState, *state_types)}


class Store:
    """Makes versions of clients' states, and holds the last ones in memory.

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
        self.types = types_by_name(types)
        self.folder: Path | None = None
        self.limit = machine_memory() // 4 if memory is None else memory
        self._device = device

    def keep_files_in(self, folder: Path) -> None:
        """Has a folder hold the files of what exceeds the memory, from the next version on."""
        self.folder = folder

    def reopen(self, folder: Path) -> dict[str, Callable]:
        """Returns the types by which `load_tree` reads a checkpoint in a folder.

        What is called `kept` there takes `StoredClientStates.rows`.
        """

        def states_from_rows(*rows: tuple[int, str, int, str]) -> StoredClientStates:
            versions = {}
            for client, name, nbytes, digest in rows:
                has_numbers = type(client) is int and type(nbytes) is int
                has_texts = type(name) is str and type(digest) is str
                is_state = has_numbers and has_texts and STATE_FILE.fullmatch(f"{name}{SUFFIX}")
                if not is_state or not name.startswith(f"{client:06}-") or client in versions:
                    raise ValueError(f"{[client, name, nbytes, digest]!r:.160} for a client's state")
                versions[client] = Version(folder / STATES / f"{name}{SUFFIX}", nbytes, digest)
            return StoredClientStates(self, versions)

        return {**self.types, "kept": states_from_rows}

    def keep(self, states: Mapping[int, Tree], new: dict[int, Tree], round: int) -> StoredClientStates:
        """Returns the states with copies of new ones, and evicts the oldest to files until the rest fits into memory.

        Raises:
            NonFiniteLoss: If a new one of `round`, from 0, has a value that is infinite or NaN.
            OSError: If the disk does not take them.
        """
        refuse_non_finite({"clients": new}, round)
        if isinstance(states, StoredClientStates):
            versions = {client: version for client, version in states.versions.items() if client not in new}
        else:  # a method's own at the start
            versions = {}
            new = {**states, **new}
        device = self._device_of_new_states()
        for client, state in new.items():
            copy = tree_map(lambda leaf: leaf.to(device, copy=True).contiguous(), state)
            nbytes = sum(leaf.nbytes for leaf in leaves(copy))
            versions[client] = Version(Path(f"{client:06}-{round}{SUFFIX}"), nbytes, state=copy)
        if self.folder is not None:
            self._evict(versions.values(), self.folder)
        return StoredClientStates(self, versions)

    def _device_of_new_states(self) -> torch.device:
        """Returns where new states stay: on the run's device while a quarter of its memory is free, else on the CPU."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            if 4 * free <= total:
                return torch.device("cpu")
        return self._device

    def _evict(self, versions: Iterable[Version], folder: Path) -> None:
        """Writes states to files, the oldest versions first, until the rest fits into memory."""
        in_memory = [version for version in versions if version.state is not None]
        excess = sum(version.nbytes for version in in_memory) - self.limit
        for version in in_memory:
            if excess <= 0:
                return
            version.write(folder)
            version.state = None
            excess -= version.nbytes


def refuse_non_finite(state: Any, round: int) -> None:
    """Raises NonFiniteLoss if a tensor of a state has NaN or inf; `round` counts from 0."""
    _, tensors = to_names(state)
    is_finite = {name: leaf.isfinite().all() for name, leaf in tensors.items() if leaf.is_floating_point()}
    for name, flag in to_device(is_finite, "cpu").items():
        if not flag:
            raise NonFiniteLoss(f"'{name[1:]}' of the state is not finite in round {round + 1}; use a smaller --lr.")


def find_stored_states(state: Any) -> dict[str, StoredClientStates]:
    """Returns the fields of a server's state that a store keeps, which reads a client's part when it is asked for."""
    fields = getattr(state, "_fields", ())
    parts = {name: getattr(state, name) for name in fields}
    return {name: part for name, part in parts.items() if isinstance(part, StoredClientStates)}


def list_versions(state: Any) -> list[Version]:
    """Returns the versions of clients' states in a server's state."""
    versions: list[Version] = []
    for states in find_stored_states(state).values():
        versions += states.versions.values()
    return versions


def write_versions(state: Any, folder: Path) -> list[str]:
    """Writes the versions in a method's state that have no file yet; returns the names of all, for a checkpoint.

    Their files stay when nobody holds them any longer: whoever writes a checkpoint removes what none names.
    """
    names = []
    for version in list_versions(state):
        version.write(folder)
        if version.remove is not None:
            version.remove.detach()
        names.append(version.file.stem)
    return names
