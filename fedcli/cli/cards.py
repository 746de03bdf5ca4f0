"""The cards of methods on a terminal: lines that are wider than it are broken."""

import re
import textwrap

ITEM = re.compile(r"\s*(\d+\.|[-*]) ")  # begins an item of a list


def fit(card: str, width: int) -> str:
    """Break the lines of a card that are wider than a terminal: texts between words, formulas and tables at gaps."""
    if max(map(len, card.splitlines()), default=0) <= width:
        return card
    lines: list[str] = []
    paragraph: list[str] = []  # the lines of a paragraph or an item
    for line in card.splitlines():
        pieces = re.split(r"(?<!\d\.) {2,}", line.strip())
        is_text = line.strip() and len(pieces) == 1
        if is_text and _goes_on(paragraph, line):
            paragraph.append(line)
            continue
        lines += _wrap(paragraph, width)
        paragraph = []
        if is_text:
            paragraph.append(line)
        elif len(line) <= width:
            lines.append(line)
        else:
            lines += [indent_of(line) + piece for piece in pieces]
    lines += _wrap(paragraph, width)
    return "\n".join(lines)


def _goes_on(paragraph: list[str], line: str) -> bool:
    """Whether a line goes on with the paragraph or the item before it."""
    if not paragraph or ITEM.match(line):
        return False
    indent = indent_of(paragraph[-1])
    hangs = len(paragraph) == 1 and ITEM.match(paragraph[0]) and indent_of(line) > indent
    return indent_of(line) == indent or bool(hangs)


def _wrap(paragraph: list[str], width: int) -> list[str]:
    """The lines of a paragraph or an item, broken between words; none of none."""
    if not paragraph:
        return []
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=indent_of(paragraph[0]),
        subsequent_indent=indent_of(paragraph[-1]),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(" ".join(line.strip() for line in paragraph))


def indent_of(line: str) -> str:
    """The spaces before a line."""
    return line[: len(line) - len(line.lstrip())]
