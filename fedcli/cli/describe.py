"""Methods, options and protocols as text for the terminal: nothing is printed here."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from fedcli import declarations, registry
from fedcli.declarations import Method, Post, Protocol
from fedcli.runs import config

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


def reflow(card: str, width: int) -> list[str]:
    """Break a method's card into lines of at most `width`: fill paragraphs and items, keep tables and commands.

    Args:
        card: A numbered item or a paragraph continues in lines of the same indent.
        width: Characters a line; a card that fits stays as it is.
    """
    lines = card.splitlines()
    if max(map(len, lines), default=0) <= width:
        return lines
    blocks: list[tuple[str, int]] = []  # text, and the indent of what continues it
    for line in lines:
        text, indent, item = line.strip(), len(line) - len(line.lstrip()), re.match(r"\s*\d+\. ", line)
        begins = not text or item or "  " in text or text.startswith("fedcli ")
        if blocks and not begins and indent == blocks[-1][1]:
            blocks[-1] = (f"{blocks[-1][0]} {text}", indent)
        else:
            # Where an item's text begins, or the last column of a table, or a paragraph.
            start = item or re.match(r"(.*\s{2,})?", line)
            blocks.append((line, start.end() if text else -1))
    filled = []
    for block, hang in blocks:
        whole = {"break_long_words": False, "break_on_hyphens": False}
        filled += textwrap.wrap(block, width, subsequent_indent=" " * hang, **whole) or [""]
    return filled


def protocols_of(method: Method | Post) -> list[Protocol]:
    """Find the protocols of the method's file; where it has none, those of the paper of its default protocol.

    A step after the last round has none.
    """
    if own := getattr(method.module, "PROTOCOLS", ()):
        return list(own)
    paper = getattr(method, "default_protocol", "").split(":")[0]
    return [protocol for protocol in registry.protocols().values() if protocol.name.split(":")[0] == paper]


def protocol_names(method: Method) -> str:
    """Name the method's default protocol, and in brackets the one for built-in data where it is another."""
    if not protocols_of(method):
        return ""
    names = [registry.default_protocol(method, dataset).name for dataset in (None, config.DEFAULT_DATASET)]
    return names[0] if names[0] == names[1] else f"{names[0]} ({names[1]} for built-in data)"


def protocol_rows(protocol: Protocol) -> list[tuple[str, str]]:
    """Tell what a protocol fixes, as pairs of title and text."""
    rows = [("set-up", protocol.summary), ("source", protocol.source), ("values", _settings(protocol.settings))]
    for name, setting in protocol.datasets.items():
        options = f"; {_settings(setting.settings)}" if setting.settings else ""
        networks = setting.backbone.replace(",", ", ")
        rows.append((name, f"{networks}, augmentation {setting.augmentation}{options} ({setting.source})"))
    rows += [(f"for {name}", _settings(options)) for name, options in protocol.method_options.items()]
    for dataset, setting in protocol.datasets.items():
        rows += [(f"for {name} on {dataset}", _settings(own)) for name, own in setting.method_options.items()]
    rows += [
        ("headline", SELECTIONS.get(protocol.selection, protocol.selection)),
        ("evaluation", EVALUATIONS[protocol.evaluation]),
    ]
    return [*rows, *(("note", note) for note in protocol.notes)]


def option_help(method: Method | Post, field: Field) -> str:
    """Write the help of an option of a method, or of a step after the last round, with its default."""
    default = _default(method, field)
    return declarations.help_text(field.metadata) + (f" [default: {default}]" if default else "")


def _default(method: Method | Post, field: Field) -> str:
    """Tell the default as far as it is known without a data set; empty where the help says it in words."""
    if field.name == "protocol":
        return protocol_names(method)
    known = [*registry.protocols().values(), *protocols_of(method)]
    if field.name == "backbone" or any(field.name in protocol.settings for protocol in known):
        return "from the protocol"
    declared = [one for protocol in known for one in (protocol, *protocol.datasets.values())]
    tuned = any(field.name in one.method_options.get(method.name, {}) for one in declared)
    default = "" if field.default is None else _word(field.default)
    return f"{default}, unless the protocol says otherwise" if tuned else default


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
