"""A trained model as a file that needs no fedcli, with a card beside it that says what it is and how to load it."""

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedcli.data.files import write_atomically
from fedcli.declarations import Protocol
from fedcli.errors import UserError
from fedcli.registry import find_method, protocols
from fedcli.runs.config import describe_reductions
from fedcli.runs.consent import with_own_files
from fedcli.runs.models import Classifier
from fedcli.runs.records import reductions_of
from fedcli.runs.run import Run

SUFFIXES = {"pt": ".pt2", "safetensors": ".safetensors"}
TESTED = {
    "server": "on the test images",
    "clients": "on the clients' own test parts, pooled",
    "domains": "of each client's model on the test images of the other domains, the mean",
}


def export(
    run: Run,
    format: str = "pt",
    client: int | None = None,
    round: str = "selected",
    prototypes: bool = False,
    out: str | Path | None = None,
) -> tuple[Path, Path]:
    """Writes a trained model to a file, and a card in Markdown beside it.

    Args:
        run: A finished run.
        format: "pt", a program of `torch.export` for batches of any size, normalisation included; or "safetensors",
            the tensors alone.
        client: As the next two, see `Run.model`.
        round: Of which round.
        prototypes: Whether it classifies by the nearest prototype.
        out: The file; in the run's folder where not given. What is there is replaced.

    Returns:
        The file and its card.

    Raises:
        UserError: If there is no such model or format, or `torch.export` cannot take the network.
    """
    if format not in SUFFIXES:
        raise UserError(f"--format must be {' or '.join(SUFFIXES)} (got '{format}'); choose one of them.")
    parts = ["model", *([] if client is None else [f"client-{client}"]), *["last"] * (round == "last")]
    parts += ["prototypes"] * prototypes
    file = Path(out) if out is not None else run.path / ("-".join(parts) + SUFFIXES[format])
    if file.suffix != SUFFIXES[format]:
        raise UserError(f"--out must end in {SUFFIXES[format]} (got '{file}'); name it so, or choose another --format.")
    run = replace(run, record=with_own_files(run.record, run.files, "the same command with"))
    model = run.model(client, round, prototypes=prototypes)
    write = _program(model, run) if format == "pt" else _tensors(model, run)
    write_atomically(file, write)
    card = file.with_name(f"{file.name}.md")
    text = card_of(run, model, file.name, format, client, round)
    write_atomically(card, lambda path: path.write_text(text, encoding="utf-8"))
    return file, card


def _program(model: Classifier, run: Run) -> Callable[[Path], None]:
    """What writes a model as the program that its forward pass is."""
    example = torch.rand(2, *run.record["model"]["input"], dtype=model.mean.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        try:
            program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("N", min=1)},))
        except Exception as error:  # whatever a user's own network makes of it
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"torch.export cannot take this network ({type(error).__name__}: {reason}); use --format safetensors."
            ) from error
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    return lambda path: path.write_bytes(buffer.getvalue())


def _tensors(model: Classifier, run: Run) -> Callable[[Path], None]:
    """What writes a model's tensors by name: `body.` and `head.` of the network, `mean` and `std` of the pixels."""
    tensors = {name.removeprefix("network."): value for name, value in model.state_dict().items()}
    about = {"format": "pt", "method": run.record["method"], "class_names": json.dumps(run.record["class_names"])}
    return lambda path: save_file(tensors, path, about)


def card_of(run: Run, model: Classifier, name: str, format: str, client: int | None, round: str) -> str:
    """The card of an exported model, all of it from the record and the method's card.

    Args:
        run: The run.
        model: The model.
        name: Of its file.
        format: One of `SUFFIXES`.
        client: Whose own model it is; None for the global one.
        round: "selected" or "last".
    """
    record, method = run.record, find_method(run.record["method_source"])
    protocol = protocols().get(record["protocol"])
    summary, config = record["summary"], record["config"]
    number = summary["selected_round"] if round == "selected" else record["rounds"][-1]["round"]
    mean, std = (", ".join(f"{value:g}" for value in record["normalisation"][key]) for key in ("mean", "std"))
    shape = " x ".join(map(str, record["model"]["input"]))
    versions = ", ".join(f"{library} {record['versions'][library]}" for library in ("fedcli", "torch", "python"))
    whose = "global model" if client is None else f"client {client}'s own model"
    rows = {
        "Model": f"{whose} after round {number + 1} of {config['rounds']} ({round})",
        "Network": f"{_backbone(record, client)}, {sum(p.numel() for p in model.network.parameters()):,} parameters",
        "Method": f"`{method.name}`, {method.title}",
        "Data set": f"{record['dataset']}, fingerprint {record['dataset_fingerprint']}",
        "Protocol": f"`{record['protocol']}`" + (f": {protocol.summary} ({protocol.source})" if protocol else ""),
        "Options that differ from it": ", ".join(_differing(record)) or "none",
        "Reduced": describe_reductions(reductions_of(record)) or "no",
        "Accuracy": _accuracy(record, number, protocol, method.prototypes is not None, client is not None),
        "Input": f"float images [N, {shape.replace(' x ', ', ')}] from 0 to 1, computed in {model.mean.dtype}",
        "Normalisation, inside" if format == "pt" else "Normalisation, to be done": f"mean {mean}; std {std}",
        "Output": _output(model),
        "Made by": f"{versions}; commit {record['commit'] or 'unknown'}; exported by fedcli {version('fedcli')}, "
        f"torch {torch.__version__}",
        "Command": f"`{record['command']}`",
    }
    table = "\n".join(f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in rows.items())
    names = ", ".join(record["class_names"])
    paper = "\n\n".join(method.card.split("\n\n")[:2])
    loading = _loading(model, name, format, record["model"]["input"])
    title = f"# {method.name} on {record['dataset']}: {name}"
    classes = f"Classes, in the order of the output: {names}."
    return f"{title}\n\n{paper}\n\n| | |\n|---|---|\n{table}\n\n{classes}\n\n## Loading\n\n{loading}"


def _backbone(record: dict[str, Any], client: int | None) -> str:
    names = record["config"]["backbone"].split(",")
    return names[(client or 0) % len(names)]


def _differing(record: dict[str, Any]) -> list[str]:
    """The options that neither the protocol nor a default has set, those aside that the card names anyway."""
    named = {"protocol", "dataset", "device", "eval_every", "drift_every", "checkpoint_every"}
    known = ("default", "protocol ", "num_clients", "seed", "no validation part")
    config = record["config"]
    own = [name for name, origin in record["origin"].items() if name in config and not origin.startswith(known)]
    return [f"{name} {config[name]}" for name in own if name not in named]


def _accuracy(record: dict[str, Any], number: int, protocol: Protocol | None, by_prototypes: bool, own: bool) -> str:
    """What the record says of the accuracy: the round's, the headline and its rule."""
    entry, summary = record["rounds"][number], record["summary"]
    setting = protocol.datasets.get(record["dataset"]) if protocol else None
    rule = f"top-{setting.top_k} " if setting is not None and setting.top_k > 1 else ""
    text = f"{100 * entry['test_accuracy']:.2f} % {rule}{TESTED[record['evaluation']]}"
    text += ", the mean of all clients' models" if own and record["evaluation"] == "server" else ""
    text += " by the nearest prototype" if by_prototypes else ""
    if "classifier_accuracy" in entry:
        text += f", {100 * entry['classifier_accuracy']:.2f} % by the classifier"
    headline = f"the run's headline is {100 * summary['selected']:.2f} % ({summary['selection']})"
    return f"{text}; {headline}; the last round has {100 * summary['last']:.2f} %"


def _output(model: Classifier) -> str:
    classes = model.network.head.out_features
    if model.prototypes is None:
        return f"logits [N, {classes}] of the classifier"
    return f"[N, {classes}], minus the squared distance of the features to each class's prototype, -inf without one"


def _loading(model: Classifier, name: str, format: str, shape: list[int]) -> str:
    """How to load the file, in Markdown."""
    if format == "pt":
        kind = "" if model.mean.dtype == torch.float32 else f", dtype={model.mean.dtype}"
        return f"""It needs PyTorch alone, of the version above or a later one that still reads it.

```python
import torch

model = torch.export.load("{name}").module()
images = torch.rand(8, {", ".join(map(str, shape))}{kind})  # floats from 0 to 1
with torch.no_grad():
    labels = model(images).argmax(1)
```
"""
    return f"""The file has the tensors alone: `body.` gives the features, `head.` is the classifier, `mean` and `std`
are the normalisation. `fedcli export --format pt` writes a model that needs no definition of the network.

```python
from safetensors.torch import load_file

tensors = load_file("{name}")
```

The network:

```
{model.network}
```
"""
