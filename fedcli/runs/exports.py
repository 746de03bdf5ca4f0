"""Models of runs as files for plain PyTorch, each with a card that says what it is."""

import io
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save as serialize

from fedcli.core.clients import Tensors
from fedcli.core.keyed_draws import KEY_ENDING
from fedcli.errors import UserError, first_line
from fedcli.files import write_atomically
from fedcli.run_files import refuse_file_of_a_run
from fedcli.runs.models import round_index_of
from fedcli.runs.saved_run import Classifier, SavedRun
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import reductions


class ExportFormat(NamedTuple):
    """A form that an exported model can have."""

    suffix: str  # of the file
    loading: str  # the code that loads one


FORMATS = {
    "pt": ExportFormat(".pt2", loading="torch.export.load(file).module()"),
    "safetensors": ExportFormat(".safetensors", loading="safetensors.torch.load_file(file)"),
}


class Exported(NamedTuple):
    """What an export has written."""

    file: Path
    card: Path  # in Markdown, what the model is


def export(
    run: SavedRun,
    format: str = "pt",
    client: int | None = None,
    round: str = "selected",
    prototypes: bool = False,
    out: str | Path | None = None,
) -> Exported:
    """Writes a model, see `SavedRun.model`, to a file and a card in Markdown beside it.

    The format is "pt", a program of `torch.export` for batches of any size, or "safetensors", the tensors alone. By
    default the file is in the run's folder; an existing one is replaced. The suffix of the format is appended to a
    name without it.

    Raises:
        UserError: If there is no such model or format, or `torch.export` cannot take the network.
    """
    if format not in FORMATS:
        raise UserError(f"--format must be {' or '.join(FORMATS)} (got '{format}'); choose one of them.")
    model = run.model(client, round, prototypes=prototypes)
    record = run.record
    content = _program(model, record["model"]["input"]) if format == "pt" else _tensor_file(model, record)
    name = "model" if client is None else f"model-client-{client}"
    if round == "last":
        name += "-last"
    if prototypes:
        name += "-prototypes"
    suffix = FORMATS[format].suffix
    file = Path(out or run.path / name)
    if file.is_dir():
        file = file / name
    if file.suffix != suffix:  # appended, since model-lr0.1 has a dot of its own
        file = file.with_name(f"{file.name}{suffix}")
    refuse_file_of_a_run(file)
    card = file.with_name(f"{file.name}.md")
    text = f"# {record['method']} on {record['dataset']}: {file.name}\n\n"
    text += _description(record, model, client, round)
    text += f"* To load it: `{FORMATS[format].loading}`\n"
    card.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda temporary: temporary.write_bytes(content))
    write_atomically(card, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return Exported(file, card)


def _program(model: Classifier, input_shape: list[int]) -> bytes:
    """Returns the file of a program of `torch.export` for batches of any size, of images `[channels, H, W]`."""
    example = torch.rand(2, *input_shape, dtype=model.mean.dtype)
    try:
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("N", min=1)},))
    except Exception as error:  # whatever a user's own network makes of it
        raise UserError(f"torch.export refuses it ({first_line(error)}); use --format safetensors.") from error
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _tensor_file(model: Classifier, record: Record) -> bytes:
    """Returns the file of a model's tensors alone, with the names of its classes."""
    tensors = {
        name.removeprefix("network."): value.clone(memory_format=torch.contiguous_format)
        for name, value in _tensors(model).items()
    }
    facts = {"format": "pt", "method": record["method"], "class_names": json.dumps(record["class_names"])}
    return serialize(tensors, facts)


def _tensors(model: Classifier) -> Tensors:
    """Returns all tensors of a model, but for the keys of dropout, which is off."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: value for name, value in tensors.items() if not name.endswith(KEY_ENDING)}


def _description(record: Record, model: Classifier, client: int | None, round: str) -> str:
    """Returns what a model is, as items of a list in Markdown."""
    entry = record["rounds"][round_index_of(record, round)]
    accuracy = entry["test_accuracy"]
    owner = f"Model of client {client}"
    if client is None:
        accuracy = entry.get("global_accuracy", accuracy)
        owner = "Global model"
    conditions = ", ".join([f"`{record['protocol']}`", *reductions(record).values()])
    outputs = "logits"
    if model.prototypes is not None:
        outputs = "minus the squared distances of the features to the prototypes"
    return f"""\
* {owner} of round {entry["round"] + 1} of {record["config"]["rounds"]} ({round}), under {conditions}
* Accuracy of the run in this round: {100 * accuracy:.2f} %
* Takes images {[None, *record["model"]["input"]]} in 0 to 1, of type {model.mean.dtype}; gives {outputs}
* Classes: {", ".join(record["class_names"])}
* Made by fedcli {record["versions"]["fedcli"]}: `{record["command"]}`
"""
