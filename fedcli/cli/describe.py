"""Summaries of methods, steps after the last round and protocols, made from what they declare.

`python -m fedcli.cli.describe`, which `make index` runs, writes them into papers/index.json.
"""

import os
from contextlib import suppress
from typing import Any

from fedcli import registry
from fedcli.cli.index import INDEX, PAPERS, SETUP, Index, Rows, Summary, index, index_text
from fedcli.cli.option_words import settings_words
from fedcli.declarations import SELECTIONS, Method, Post, Protocol, paper_of
from fedcli.errors import UserError
from fedcli.userfiles import names_user_file

EVALUATIONS = {
    "server": "on the official test images",
    "clients": "on each client's own test part",
    "domains": "on each domain's test images",
}


def make_index() -> Index:
    """Make the index from what is registered."""
    from fedcli.core.backbones import BACKBONES

    return Index(
        methods={name: summarise(method) for name, method in registry.methods().items()},
        posts={name: summarise(step) for name, step in registry.posts().items()},
        protocols={name: protocol_rows(protocol) for name, protocol in registry.protocols().items()},
        tables={name: table.title for name, table in registry.tables().items()},
        backbones=list(BACKBONES),
    )


def find_summary(name: str) -> Summary:
    """Find the summary of a method; a registered one is not imported, nor PyTorch with it."""
    if names_user_file(name):
        return summarise(registry.find_method(name))
    return registry.pick(name, "method", index().methods)


def summarise(declared: Method | Post) -> Summary:
    """Summarise a method, or a step after the last round."""
    return Summary(
        name=declared.name,
        title=declared.title,
        file=os.path.relpath(declared.file, PAPERS),
        config=declared.config,
        personal=isinstance(declared, Method) and declared.personal is not None,
        defaults=_changed_defaults(declared) if isinstance(declared, Method) else {},
        protocols=[(protocol.name, protocol.summary) for protocol in _protocols_of(declared)],
    )


def _changed_defaults(method: Method) -> dict[str, Any]:
    """Find the values of a run with no option given that differ from their fields'; none if it needs an option."""
    from fedcli.runs.options import recorded_fields
    from fedcli.runs.resolve import resolve

    options = recorded_fields(method)
    with suppress(UserError):
        values = resolve(method, {}, need_data=False).all_options()
        return {name: value for name, value in values.items() if value != options[name].default}
    return {}


def _protocols_of(declared: Method | Post) -> list[Protocol]:
    """Find the protocols in its file, or else those of the paper of its default protocol."""
    own = registry.declared_in(Protocol, declared.module)
    if own:
        return list(own.values())
    paper = paper_of(getattr(declared, "default_protocol", ""))
    return [protocol for protocol in registry.protocols().values() if protocol.paper == paper]


def protocol_rows(protocol: Protocol) -> Rows:
    """List what a protocol fixes, as pairs of title and text."""
    rows = [
        (SETUP, protocol.summary),
        ("source", protocol.source),
        ("values", settings_words(protocol.settings)),
    ]
    rows += [(f"for {method}", settings_words(options)) for method, options in protocol.method_options.items()]
    for name, setting in protocol.datasets.items():
        networks = setting.backbone.replace(",", ", ")
        text = f"{networks}, augmentation {setting.augmentation}"
        if setting.settings:
            text += f"; {settings_words(setting.settings)}"
        rows.append((name, f"{text} ({setting.source})"))
        for method, options in setting.method_options.items():
            rows.append((f"for {method} on {name}", settings_words(options)))
    rows.append(("headline", f"the {SELECTIONS[protocol.selection].words}"))
    rows.append(("evaluation", EVALUATIONS[protocol.evaluation]))
    rows += [("note", note) for note in protocol.notes]
    return rows


if __name__ == "__main__":
    INDEX.write_text(index_text(make_index()), encoding="utf-8")
