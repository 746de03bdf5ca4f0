"""Files that hold a tree of tensors.

A file has the form of safetensors. Its metadata are one JSON text, since the library does not keep the order of
several: the SHA-256 of the whole file, taken with zeros in its place; the structure of the tree, see `to_names`; and
what the caller adds. Older files have a text for each of the three.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from fedcli.core.trees import Tree, from_names, to_device, to_names
from fedcli.errors import UserError, printable
from fedcli.files import write_atomically
from fedcli.run_files import RESTORE_CHECKPOINT

SUFFIX = ".safetensors"
DIGEST = re.compile(rb"sha256\W+([0-9a-f]{64})")
ZEROS = b"0" * 64


class VerifiedFile(NamedTuple):
    """What a file holds whose digest is right."""

    structure: Any  # of the tree, see `to_names`
    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]  # by path


class LoadedTree(NamedTuple):
    """What `save_tree` has written."""

    tree: Tree
    facts: dict[str, Any]


def save_tree(path: Path, tree: Tree, facts: Mapping[str, Any]) -> str:
    """Writes a tree, see `to_names`, and `facts` to a file, atomically, and returns its SHA-256 as it stands in it."""
    structure, tensors = to_names(tree)
    text = json.dumps({"sha256": ZEROS.decode(), "tree": structure, "about": dict(facts)}, allow_nan=False)
    tensors = to_device(tensors, "cpu")
    tensors = {name: leaf.detach().contiguous().clone() for name, leaf in tensors.items()}  # may share no memory
    content = safetensors.save(tensors, {"fedcli": text})
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(ZEROS, digest.encode(), 1)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return digest


def read_verified(path: Path, digest: str | None = None) -> VerifiedFile:
    """Reads a file whose SHA-256 is `digest`, or the embedded one if None.

    Raises:
        UserError: If the file is missing, damaged or another one.
    """
    content = path.read_bytes() if path.is_file() else b""
    match = DIGEST.search(content)
    is_whole = False
    if match is not None:
        actual = hashlib.sha256(content.replace(match[1], ZEROS, 1)).hexdigest()
        is_whole = actual == (digest or match[1].decode())
    if not is_whole:
        raise UserError(f"'{path}' is missing or damaged; {RESTORE_CHECKPOINT}.")
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        if "fedcli" in metadata:
            parts = json.loads(metadata["fedcli"])
        else:  # an older file
            parts = {name: json.loads(metadata[name]) for name in ("tree", "about")}
        return VerifiedFile(parts["tree"], parts["about"], safetensors.load(content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"'{path}' holds no state (got {printable(str(error))}); {RESTORE_CHECKPOINT}.") from None


def load_tree(
    path: Path, types: Mapping[str, Callable], device: torch.device | str = "cpu", digest: str | None = None
) -> LoadedTree:
    """Reads the tree and the facts that `save_tree` has written; for `types` see `from_names`.

    Raises:
        UserError: See `read_verified`; also if it is no tree, or a NamedTuple is none of the types.
    """
    structure, facts, tensors = read_verified(path, digest)
    for name, tensor in tensors.items():  # one by one, since all twice may not fit into memory
        tensors[name] = tensor.clone().to(device)  # in memory of its own: rounding may depend on its alignment
    try:
        return LoadedTree(from_names(structure, tensors, types), facts)
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # also a NamedTuple that is none of the types
        fault = printable(str(error))
        raise UserError(f"'{path}' holds another kind of state (got {fault}); use the method that wrote it.") from None
