"""Files of states and records, read and written whatever they hold, with digests that vouch for it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors

from fedcli.core.tree_files import DIGEST, ZEROS, read_verified
from fedcli.run_files import RECORD
from fedcli.runs.identity import digest_of


class Content(NamedTuple):
    """The content of a file of a state."""

    parts: dict[str, Any]  # `tree` and `about`, see `fedcli.core.tree_files`
    tensors: dict[str, torch.Tensor]


def content_of(file: Path) -> Content:
    """Reads a file of a state."""
    tree, facts, tensors = read_verified(file)
    return Content({"tree": tree, "about": facts}, tensors)


def sign_state(file: Path, content: Content) -> str:
    """Writes a file of a state, whatever it holds, with its right SHA-256, which is returned."""
    text = json.dumps({"sha256": ZEROS.decode(), **content.parts})
    tensors = {name: tensor.contiguous() for name, tensor in content.tensors.items()}
    data = safetensors.save(tensors, {"fedcli": text})
    digest = hashlib.sha256(data).hexdigest()
    file.write_bytes(data.replace(ZEROS, digest.encode(), 1))
    return digest


def digest_of_file(file: Path) -> str:
    """Returns the SHA-256 that a file of a state gives for itself."""
    match = DIGEST.search(file.read_bytes())
    assert match is not None
    return match[1].decode()


def replace_digest(checkpoint: Path, old: str, new: str) -> None:
    """Replaces the SHA-256 by which a checkpoint names the file of a client's state, and signs the checkpoint."""
    parts, tensors = content_of(checkpoint)
    text = json.dumps(parts).replace(old, new)
    sign_state(checkpoint, Content(json.loads(text), tensors))


def sign_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes a record into the folder of a run, whatever it holds, with its right digest."""
    text = json.dumps({**record, "digest": digest_of(record)})
    (folder / RECORD).write_text(text)
