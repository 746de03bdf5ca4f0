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
        text, indent, item = line.strip(), len(line) - len(line.lstrip()), re.match(r"\s*\d+\. +", line)
        begins = not text or item or "  " in text or text.startswith("fedcli ")
        if blocks and not begins and indent == blocks[-1][1]:
            blocks[-1] = (f"{blocks[-1][0]} {text}", indent)
        else:
            # Where an item's text begins, or a table's last column, or a formula or paragraph.
            start = (item or re.match(r"(.*\s{2,})?", line)).end()
            hang = start if start <= 0.6 * width else indent
            blocks.append((line, hang if text else -1))
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    filled = []
    for block, hang in blocks:
        wrapper.subsequent_indent = " " * hang
        filled += wrapper.wrap(block) or [""]
    return filled


def protocols_of(method: Method | Post) -> list[Protocol]:
    """Find the protocols of the method's file; where it has none, those of the paper of its default protocol.

    A step after the last round has none.
    """
    paper = getattr(method, "default_protocol", "").split(":")[0]
    of_paper = [protocol for protocol in registry.protocols().values() if protocol.name.split(":")[0] == paper]
    return list(getattr(method.module, "PROTOCOLS", ()) or of_paper)


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
        rows += [(f"for {name} on {dataset}", _settings(options)) for name, options in setting.method_options.items()]
    rows.append(("headline", SELECTIONS.get(protocol.selection, protocol.selection)))
    rows.append(("evaluation", EVALUATIONS[protocol.evaluation]))
    return rows + [("note", note) for note in protocol.notes]


def option_help(method: Method | Post, field: Field) -> str:
    """Write the help of an option of a method, or of a step after the last round, with its default.

    The default is told as far as it is known without a data set, and not where the help says it in words.
    """
    settings, tuned = {"backbone"}, set()
    for protocol in (*registry.protocols().values(), *protocols_of(method)):
        settings |= protocol.settings.keys()
        for setting in (protocol, *protocol.datasets.values()):
            tuned |= setting.method_options.get(method.name, {}).keys()
    if field.name == "protocol":
        default = protocol_names(method)
    elif field.name in settings:
        default = "from the protocol"
    else:
        default = "" if field.default is None else _word(field.default)
        default += ", unless the protocol says otherwise" if field.name in tuned else ""
    return declarations.help_text(field.metadata) + (f" [default: {default}]" if default else "")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
