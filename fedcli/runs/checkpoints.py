"""The files that a run goes on from: its checkpoints, and the trees of tensors in them and in those of clients' states.

A file has the form of safetensors. What it says beside its tensors is one JSON text of its metadata, since the library
orders several by chance: the SHA-256 of the whole file, taken with zeros in its own place; the structure of the tree,
see `to_names`; and what the caller adds. Older files have a text for each of the three.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize

from fedcli.core.federation import Federation
from fedcli.core.trees import Tree, from_names, leaves, stored, to_names
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.records import identity

SUFFIX = ".safetensors"
CHECKPOINT, PREVIOUS = f"checkpoint{SUFFIX}", f"checkpoint-before{SUFFIX}"
SELECTED = f"selected{SUFFIX}"  # the models of the best round, see fedcli/runs/models.py
STATES = "states"  # folder of what clients keep, see fedcli/runs/store.py
STATES_OF_WORKER = "states-w"  # of what every worker but the first keeps there for itself, its number behind
METADATA = "fedcli"  # key of the JSON text
DIGEST = re.compile(rb"sha256\W+([0-9a-f]{64})")
HEAD_BYTES = 1024  # of a file, which hold its digest
ZEROS = b"0" * 64
IN_CHECKPOINT = ("rounds", "cost", "seconds_total", "peak_bytes")  # what a round adds to the record
SHARE, LONGEST = 0.05, 600.0  # of the time that checkpoints may take; seconds between two of them


class Damaged(Exception):
    """A file is not as it was written; the text says by what that shows."""


def save(path: Path, tree: Tree, facts: Mapping[str, Any], previous: Path | None = None) -> str:
    """Writes a tree of tensors, numbers and texts to a file, atomically, and returns its SHA-256 as it stands in it.

    NamedTuples are kept by name, and of what a store keeps the names of the versions. JSON holds the `facts`, and
    `previous` the file that is replaced.
    """
    structure, tensors = to_names(tree)
    for name, tensor in tensors.items():  # the library refuses tensors that share memory
        tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    text = json.dumps({"sha256": ZEROS.decode(), "tree": structure, "about": dict(facts)})
    content = serialize(tensors, {METADATA: text})
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(ZEROS, digest.encode(), 1)

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)
        if previous is not None and path.is_file():
            path.replace(previous)

    write_atomically(path, write)
    return digest


def verify(path: Path, digest: str | None = None) -> bytes:
    """Reads a file that `save` has written, and returned the digest of, where that is known; returns its bytes.

    Raises:
        Damaged: If a byte is not the one that was written, or it is another file or none.
    """
    if not path.is_file():
        raise Damaged("it is missing")
    content = path.read_bytes()
    match = DIGEST.search(content, 0, HEAD_BYTES)
    if match is None:
        raise Damaged("it is cut or has no SHA-256")
    actual, expected = hashlib.sha256(content.replace(match[1], ZEROS, 1)).hexdigest(), digest or match[1].decode()
    if actual != expected:
        raise Damaged(f"its SHA-256 is {actual[:16]}, was {expected[:16]}")
    return content


def load(
    path: Path,
    types: Mapping[str, Callable[..., Any]] | None = None,
    device: torch.device | str = "cpu",
    digest: str | None = None,
) -> tuple[Tree, dict[str, Any]]:
    """Reads what `save` has written, and returns the tree and what else the file says.

    `types` maps names to NamedTuple classes of the tree; its entry `kept` rebuilds what a store keeps from its rows.

    Raises:
        Damaged: See `verify`.
        UserError: If a NamedTuple is none of the types.
    """
    content = verify(path, digest)
    structure, facts = _read_metadata(content)
    tensors = deserialize(content)
    for name, tensor in tensors.items():
        tensors[name] = tensor.clone().to(device)  # in memory of its own: rounding may depend on its alignment
    try:
        return from_names(structure, tensors, types or {}), facts
    except (KeyError, TypeError) as error:  # a NamedTuple that is none of the types, or has other fields
        allowed = ", ".join(name for name in types or {} if name != "kept")
        raise UserError(
            f"the file '{path}' holds a state of another kind (got {error}; {allowed} are allowed); read it with the "
            "method that wrote it."
        ) from None


def _read_metadata(content: bytes) -> tuple[Any, dict[str, Any]]:
    """Returns the structure of the tree in a verified file and what else the file says."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    if METADATA in metadata:
        parts = json.loads(metadata[METADATA])
        return parts["tree"], parts["about"]
    return json.loads(metadata["tree"]), json.loads(metadata["about"])  # of an older file


def is_due(number: int, every: int | None, rounds: int, seconds: float, since: float) -> bool:
    """Returns whether round `number` of `rounds` ends with a checkpoint: one in `every`, and the last.

    Where `every` is None, they take a twentieth of the time at most but come at least every ten minutes: the last one
    took `seconds`, 0 before the first, and ended `since` seconds ago.
    """
    if number + 1 == rounds:
        return True
    if every is not None:
        return (number + 1) % every == 0
    return since >= min(seconds * (1 / SHARE - 1), LONGEST)


def write_checkpoint(folder: Path, record: dict[str, Any], state: Any) -> None:
    """Writes the state and all that the record knows by then; the checkpoint before it is kept.

    After a kill either file, this or the record, may be the older one.
    """
    names = []
    for kept in _kept(state):
        kept.write()
        names += [name for _, name, *_ in kept.rows()]
    facts = {"identity": identity(record), "record": {key: record[key] for key in IN_CHECKPOINT}, "states": names}
    save(folder / CHECKPOINT, state, facts, previous=folder / PREVIOUS)
    clear(folder)


def clear(folder: Path, *, at_rest: bool = False) -> None:
    """Removes what clients have kept and no checkpoint in a run's folder names, which a kill may leave too.

    Where the run is at rest, other workers' files go as well.
    """
    names = set()
    for checkpoint in (folder / CHECKPOINT, folder / PREVIOUS):
        with suppress(Damaged):
            names.update(_read_metadata(verify(checkpoint))[1].get("states", []))
    for file in (folder / STATES).glob("*"):
        if file.name.removesuffix(SUFFIX) not in names:
            file.unlink()
    if at_rest:
        for other in folder.glob(f"{STATES_OF_WORKER}*"):
            shutil.rmtree(other, ignore_errors=True)  # they may be removing some themselves
        with suppress(OSError):  # it is not empty, or not there
            (folder / STATES).rmdir()


def clear_finished(folder: Path, record: dict[str, Any]) -> None:
    """Removes from the folder of a finished run the checkpoint before the last, and models that are not the best."""
    (folder / PREVIOUS).unlink(missing_ok=True)
    if record["summary"]["selected_round"] == record["rounds"][-1]["round"]:  # they are in the last checkpoint
        (folder / SELECTED).unlink(missing_ok=True)
    clear(folder, at_rest=True)


def read_checkpoint(
    folder: Path, record: dict[str, Any], setup: Setup, fed: Federation
) -> tuple[Any, dict[str, Any], str]:
    """Reads what a run goes on from: the newest checkpoint or, where that is damaged, the one before it.

    Returns:
        The method's state, what the record says up to it, and what was wrong with a newer checkpoint; the initial ones
        where there is none.

    Raises:
        UserError: If the checkpoints are damaged, or one is another run's or of another kind.
    """
    initial, damage = setup.method.init(fed, setup.options), []
    for file in (folder / CHECKPOINT, folder / PREVIOUS):
        if not file.is_file():
            continue
        try:
            state, facts = load(file, fed.store.reopen(folder), fed.device)
            if facts["identity"] != identity(record):
                raise UserError(
                    f"the checkpoint '{file}' is of another run (got identity {facts['identity'][:16]}, was "
                    f"{identity(record)[:16]}); put the run's own back, or delete it to go on from an earlier round."
                )
            for kept in _kept(state):
                kept.verify()
        except Damaged as error:
            damage.append(f"the checkpoint '{file}' is damaged ({error})")
            continue
        if difference := _difference(initial, state):
            raise UserError(
                f"the checkpoint '{file}' holds an incompatible state ({difference}); "
                "delete it to resume from the first round, or start a new run."
            )
        return state, facts["record"], "".join(f"{text}; going on from the one before it" for text in damage)
    if damage:
        raise UserError(f"{', and '.join(damage)}; delete all of them to resume from the first round.")
    return initial, {"rounds": [], "cost": None}, ""


def _kept(state: Any) -> list[Any]:
    """Returns the parts of a state that a store keeps."""
    return [leaf for leaf in leaves(state) if isinstance(leaf, Mapping)]


def _difference(initial: Any, loaded: Any) -> str:
    """Says where a loaded state lacks a tensor of the initial one or has it in another form; empty for nowhere.

    What is None or empty at first may become anything, as what clients keep; integers, such as ids, may become more.
    """
    tensors, kept = to_names(loaded)[1], tuple(f"/{field}/" for field in stored(loaded))
    for name, expected in to_names(initial)[1].items():
        tensor = tensors.get(name)
        same = tensor is not None and tensor.dtype == expected.dtype
        if same and expected.is_floating_point():
            same = tensor.shape == expected.shape
        if not same and not name.startswith(kept):
            form = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            return f"got state{name.replace('/', '.')} {form}, should be {expected.dtype} {list(expected.shape)}"
    return ""
