"""Methods, options and protocols as text for the terminal: nothing is printed here.

Importing the papers imports PyTorch, which takes seconds. What `list`, `show` and completion tell of them is therefore
kept in papers/index.json, which `make index` writes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any

from fedcli import declarations, papers, registry
from fedcli.declarations import Method, Post, Protocol, flag_of

PAPERS = Path(*papers.__path__)
INDEX = PAPERS / "index.json"
SELECTIONS = {
    "best-validation": "the round with the best validation accuracy",
    "best-test": "the round with the best test accuracy",
    "last": "the last round",
    "mean-last-3": "the mean of the last three rounds",
}
EVALUATIONS = {
    "server": "on the official test images",
    "clients": "on each client's own test part",
    "domains": "on each domain's test images",
}


@cache
def index() -> dict[str, Any]:
    """Methods, steps, protocols, tables and networks by name; made anew where a paper's file is not as it was."""
    stored = json.loads(INDEX.read_text(encoding="utf-8")) if INDEX.is_file() else {}
    return stored if stored.get("sha256") == _hash() else make_index()


def make_index() -> dict[str, Any]:
    """Make the index from what is registered."""
    from fedcli.core.backbones import BACKBONES

    return {
        "sha256": _hash(),
        "method": {name: summary(method) for name, method in registry.methods().items()},
        "post": {name: summary(step) for name, step in registry.posts().items()},
        "protocol": {name: protocol_rows(protocol) for name, protocol in registry.protocols().items()},
        "table": {name: table.title for name, table in registry.tables().items()},
        "backbone": list(BACKBONES),
    }


def _hash() -> str:
    """SHA-256 of the papers' files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(PAPERS.rglob("*.py")))).hexdigest()


def summary(method: Method | Post) -> dict[str, Any]:
    """Tell of a method, or of a step after the last round: title, default protocol, file, options and protocols."""
    return {
        "title": method.title,
        "protocol": protocol_names(method),
        "file": os.path.relpath(method.file, PAPERS),
        "options": [(flag_of(field.name), option_help(method, field)) for field in fields(method.config)],
        "protocols": [protocol.name for protocol in protocols_of(method)],
    }


def protocols_of(method: Method | Post) -> list[Protocol]:
    """Find the protocols of the method's file; where it has none, those of the paper of its default protocol.

    A step after the last round has none.
    """
    paper = getattr(method, "default_protocol", "").split(":")[0]
    of_paper = [protocol for protocol in registry.protocols().values() if protocol.name.split(":")[0] == paper]
    return list(getattr(method.module, "PROTOCOLS", ()) or of_paper)


def protocol_names(method: Method | Post) -> str:
    """Name the method's default protocol, and in brackets the one for built-in data where it is another."""
    if not protocols_of(method):
        return ""
    from fedcli.runs.config import DEFAULT_DATASET

    first, built_in = (registry.default_protocol(method, dataset).name for dataset in (None, DEFAULT_DATASET))
    return first if first == built_in else f"{first} ({built_in} for built-in data)"


def protocol_rows(protocol: Protocol) -> list[tuple[str, str]]:
    """Tell what a protocol fixes, as pairs of title and text."""
    rows = [("set-up", protocol.summary), ("source", protocol.source), ("values", _settings(protocol.settings))]
    for name, setting in protocol.datasets.items():
        options = f"; {_settings(setting.settings)}" if setting.settings else ""
        networks = setting.backbone.replace(",", ", ")
        rows.append((name, f"{networks}, augmentation {setting.augmentation}{options} ({setting.source})"))
    rows += [(f"for {name}", _settings(options)) for name, options in protocol.method_options.items()]
    for dataset, setting in protocol.datasets.items():
        rows += [(f"for {name} on {dataset}", _settings(options)) for name, options in setting.method_options.items()]
    rows += [("headline", SELECTIONS[protocol.selection]), ("evaluation", EVALUATIONS[protocol.evaluation])]
    return rows + [("note", note) for note in protocol.notes]


def option_help(method: Method | Post, field: Field) -> str:
    """Write the help of an option of a method, or of a step after the last round, with its default.

    The default is told as far as it is known without a data set, and not where the help says it in words.
    """
    every = [*registry.protocols().values(), *protocols_of(method)]
    settings = [setting for protocol in every for setting in (protocol, *protocol.datasets.values())]
    default = "" if field.default is None else _word(field.default)
    if field.name == "protocol":
        default = protocol_names(method)
    elif field.name == "backbone" or any(field.name in protocol.settings for protocol in every):
        default = "from the protocol"
    elif any(field.name in setting.method_options.get(method.name, ()) for setting in settings):
        default += ", unless the protocol says otherwise"
    return declarations.help_text(field.metadata) + (f" [default: {default}]" if default else "")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    INDEX.write_text(json.dumps(make_index(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
