"""What `list`, `show`, help and completion tell of methods, steps after the last round, and protocols.

Importing the papers imports PyTorch, which takes seconds. What is told of them is therefore kept in
papers/index.json, which `make index` writes.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from fedcli import papers, registry  # type: ignore[attr-defined]  # `papers` as in `fedcli.registry`
from fedcli.declarations import SELECTIONS, Method, Post, Protocol, facts_of, option, paper_of
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file

PAPERS = Path(*papers.__path__)
INDEX = PAPERS / "index.json"
KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}  # of options
EVALUATIONS = {
    "server": "on the official test images",
    "clients": "on each client's own test part",
    "domains": "on each domain's test images",
}


@cache
def index() -> dict[str, Any]:
    """Read papers/index.json: methods and steps as `summary` makes them, protocols, tables and networks, by name."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    for entries in (stored["method"], stored["post"]):
        for name, entry in entries.items():
            options = []
            for option_name, traits in entry["config"].items():
                kind = KINDS[traits.pop("type")]
                options.append((option_name, kind, option(**traits)))
            entry["config"] = make_dataclass("Config", options, init=False, repr=False, eq=False)
            entries[name] = SimpleNamespace(**entry)
    return stored


def make_index() -> dict[str, Any]:
    """Make the index from what is registered."""
    from fedcli.core.backbones import BACKBONES

    def entry(declared: Method | Post) -> dict[str, Any]:
        options = {}
        for field in fields(declared.config):
            (kind, *_) = get_args(field.type) or (field.type,)  # without what may stand behind it, None
            plain = vars(facts_of(option(field.default, "")))
            facts = vars(facts_of(field))
            changed = {name: value for name, value in facts.items() if value != plain[name]}
            options[field.name] = {"type": kind.__name__, "default": field.default, **changed}
        return {**vars(summary(declared)), "config": options}

    return {
        "method": {name: entry(method) for name, method in registry.methods().items()},
        "post": {name: entry(step) for name, step in registry.posts().items()},
        "protocol": {name: protocol_rows(protocol) for name, protocol in registry.protocols().items()},
        "table": {name: table.title for name, table in registry.tables().items()},
        "backbone": list(BACKBONES),
    }


def summary(declared: Method | Post) -> SimpleNamespace:
    """Tell of a method, or of a step after the last round.

    Returns:
        Its `name`, `title`, `file` (relative to the papers), `config` and whether it is `personal`; `defaults`, the
        values of a run with no option given that differ from their fields' (none for a method that needs an option);
        `protocols`, names and summaries of those in its file, or else of the paper of its default protocol.
    """
    from fedcli.runs.options import recorded_fields
    from fedcli.runs.resolve import resolve

    defaults = {}
    if isinstance(declared, Method):
        options = recorded_fields(declared)
        with suppress(UserError):
            values = resolve(declared, {}, need_data=False).values()
            defaults = {name: value for name, value in values.items() if value != options[name].default}
    protocols = getattr(declared.module, "PROTOCOLS", ())
    if not protocols:
        paper = paper_of(getattr(declared, "default_protocol", ""))
        protocols = [protocol for protocol in registry.protocols().values() if protocol.paper == paper]
    return SimpleNamespace(
        name=declared.name,
        title=declared.title,
        file=os.path.relpath(declared.file, PAPERS),
        config=declared.config,
        personal=bool(getattr(declared, "personal", None)),
        defaults=defaults,
        protocols=[(protocol.name, protocol.summary) for protocol in protocols],
    )


def find_summary(name: str) -> Any:
    """Find what is told of a method, by its attributes; a registered one is not imported, nor PyTorch with it."""
    if is_from_file(name):
        return summary(registry.find_method(name))
    return registry.pick("method", name, index()["method"])


def protocol_rows(protocol: Protocol) -> list[tuple[str, str]]:
    """Tell what a protocol fixes, as pairs of title and text."""
    rows = [
        ("set-up", protocol.summary),
        ("source", protocol.source),
        ("values", _settings(protocol.settings)),
    ]
    rows += [(f"for {method}", _settings(options)) for method, options in protocol.method_options.items()]
    for name, setting in protocol.datasets.items():
        networks = setting.backbone.replace(",", ", ")
        text = f"{networks}, augmentation {setting.augmentation}"
        if setting.settings:
            text += f"; {_settings(setting.settings)}"
        rows.append((name, f"{text} ({setting.source})"))
        rows += [(f"for {method} on {name}", _settings(options)) for method, options in setting.method_options.items()]
    rows.append(("headline", f"the {SELECTIONS[protocol.selection]}"))
    rows.append(("evaluation", EVALUATIONS[protocol.evaluation]))
    rows += [("note", note) for note in protocol.notes]
    return rows


def option_help(field: Field, defaults: Mapping[str, Any]) -> str:
    """Write the help of an option; its default is that of a run with no option given, or else of its field."""
    text = facts_of(field).help_text
    value = defaults.get(field.name, field.default)
    return text if value is None else f"{text} [default: {_option_word(value)}]"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_option_word(value)}" for name, value in settings.items())


def _option_word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def completion(*kinds: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Make what tells a shell the choices that a text begins, and the names of some kinds: "method", "dataset", ..."""

    def complete(incomplete: str) -> list[str]:
        names = list(choices)
        for kind in kinds:
            names += index().get(kind, ())
        if any(kind.endswith("dataset") for kind in kinds):
            from fedcli.data import datasets

            names += datasets.names()
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete


if __name__ == "__main__":
    INDEX.write_text(json.dumps(make_index(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
