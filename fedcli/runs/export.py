"""A trained model as a file that needs no fedcli, with a card beside it that says what it is and how to load it."""

import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedcli.data.files import write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.registry import find_method, protocols
from fedcli.runs.config import describe_reductions
from fedcli.runs.consent import with_own_files
from fedcli.runs.models import Classifier, backbone_of
from fedcli.runs.records import reductions_of
from fedcli.runs.run import Run

SUFFIXES = {"pt": ".pt2", "safetensors": ".safetensors"}
TESTED = {
    "server": "on the test images",
    "clients": "on the clients' own test parts, pooled",
    "domains": "of each client's model on the test images of the other domains, the mean",
}
LOADING = {
    "pt": """\
It needs PyTorch alone, of the version above or a later one that still reads it.

```python
import torch

model = torch.export.load("{name}").module()
images = torch.rand(8, {shape})  # floats from 0 to 1
with torch.no_grad():
    labels = model(images).argmax(1)
```
""",
    "safetensors": """\
The file has the tensors alone: `body.` gives the features, `head.` is the classifier, `mean` and `std`
are the normalisation. `fedcli export --format pt` writes a model that needs no definition of the network.

```python
from safetensors.torch import load_file

tensors = load_file("{name}")
```

The network:

```
{network}
```
""",
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
    name = "model" if client is None else f"model-client-{client}"
    name += ("-last" if round == "last" else "") + ("-prototypes" if prototypes else "") + SUFFIXES[format]
    file = run.path / name if out is None else Path(out)
    if file.suffix != SUFFIXES[format]:
        raise UserError(f"--out must end in {SUFFIXES[format]} (got '{file}'); name it so, or choose another --format.")
    run = replace(run, record=with_own_files(run.record, run.files, "the same command with"))
    model = run.model(client, round, prototypes=prototypes)
    if format == "pt":
        program = _program(model, run.record["model"]["input"])
        write_atomically(file, lambda path: path.write_bytes(program))
    else:
        tensors = {name.removeprefix("network."): value.clone() for name, value in model.state_dict().items()}
        about = {"format": "pt", "method": run.record["method"], "class_names": json.dumps(run.record["class_names"])}
        write_atomically(file, lambda path: save_file(tensors, path, about))
    card = file.with_name(f"{file.name}.md")
    text = card_of(run, model, file.name, format, client, round)
    write_atomically(card, lambda path: path.write_text(text, encoding="utf-8"))
    return file, card


def _program(model: Classifier, shape: Sequence[int]) -> bytes:
    """Returns a model's forward pass for batches of any size, as `torch.export` keeps it."""
    example = torch.rand(2, *shape, dtype=model.mean.dtype)
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
    return buffer.getvalue()


def card_of(run: Run, model: Classifier, name: str, format: str, client: int | None, round: str) -> str:
    """Returns the card of an exported model, all of it from the record and the method's card.

    Args:
        run: The run.
        model: The model.
        name: Of its file.
        format: One of `SUFFIXES`.
        client: Whose own model it is; None for the global one.
        round: "selected" or "last".
    """
    record, method = run.record, find_method(run.record["method_source"])
    config, summary, versions = record["config"], record["summary"], record["versions"]
    protocol = protocols().get(record["protocol"])
    number = summary["selected_round"] if round == "selected" else record["rounds"][-1]["round"]
    shape = ", ".join(map(str, record["model"]["input"]))
    mean, std = (", ".join(f"{value:g}" for value in record["normalisation"][key]) for key in ("mean", "std"))
    whose = "global model" if client is None else f"client {client}'s own model"
    size = sum(value.numel() for value in model.network.parameters())
    output = f"logits [N, {model.network.head.out_features}] of the classifier"
    if model.prototypes is not None:
        classes = f"[N, {model.network.head.out_features}]"
        output = f"{classes}, minus the squared distance of the features to each class's prototype, -inf without one"
    made_by = ", ".join(f"{library} {versions[library]}" for library in ("fedcli", "torch", "python"))
    rows = {
        "Model": f"{whose} after round {number + 1} of {config['rounds']} ({round})",
        "Network": f"{backbone_of(config['backbone'], client)}, {size:,} parameters",
        "Method": f"`{method.name}`, {method.title}",
        "Data set": f"{record['dataset']}, fingerprint {record['dataset_fingerprint']}",
        "Protocol": f"`{record['protocol']}`" + (f": {protocol.summary} ({protocol.source})" if protocol else ""),
        "Options that differ from it": ", ".join(_differing(record)) or "none",
        "Reduced": describe_reductions(reductions_of(record)) or "no",
        "Accuracy": _accuracy(record, number, method, client),
        "Input": f"float images [N, {shape}] from 0 to 1, computed in {model.mean.dtype}",
        "Normalisation, inside" if format == "pt" else "Normalisation, to be done": f"mean {mean}; std {std}",
        "Output": output,
        "Made by": f"{made_by}; commit {record['commit'] or 'unknown'}; exported by fedcli {version('fedcli')}, torch "
        f"{torch.__version__}",
        "Command": f"`{record['command']}`",
    }
    table = "\n".join(f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in rows.items())
    paper = "\n\n".join(method.card.split("\n\n")[:2])
    dtype = "" if model.mean.dtype == torch.float32 else f", dtype={model.mean.dtype}"
    loading = LOADING[format].format(name=name, shape=f"{shape}{dtype}", network=model.network)
    return f"""# {method.name} on {record["dataset"]}: {name}

{paper}

| | |
|---|---|
{table}

Classes, in the order of the output: {", ".join(record["class_names"])}.

## Loading

{loading}"""


def _differing(record: dict[str, Any]) -> list[str]:
    """Returns the options that neither the protocol nor a default has set, but for those that the card has anyway."""
    named = {"protocol", "dataset", "device", "eval_every", "drift_every", "checkpoint_every"}
    not_chosen = ("default", "protocol ", "num_clients", "seed", "no validation part")
    chosen = {name for name, origin in record["origin"].items() if not origin.startswith(not_chosen)}
    return [f"{name} {value}" for name, value in record["config"].items() if name in chosen - named]


def _accuracy(record: dict[str, Any], number: int, method: Method, client: int | None) -> str:
    """Returns what the record says of the accuracy: the round's, the headline and its rule."""
    entry, summary, protocol = record["rounds"][number], record["summary"], protocols().get(record["protocol"])
    setting = protocol.datasets.get(record["dataset"]) if protocol else None
    rule = f"top-{setting.top_k} " if setting is not None and setting.top_k > 1 else ""
    text = f"{100 * entry['test_accuracy']:.2f} % {rule}{TESTED[record['evaluation']]}"
    if client is not None and record["evaluation"] == "server":
        text += ", the mean of all clients' models"
    if method.prototypes is not None:
        text += " by the nearest prototype"
    if "classifier_accuracy" in entry:
        text += f", {100 * entry['classifier_accuracy']:.2f} % by the classifier"
    headline = f"the run's headline is {100 * summary['selected']:.2f} % ({summary['selection']})"
    return f"{text}; {headline}; the last round has {100 * summary['last']:.2f} %"
