"""What all pages are made of."""

from collections.abc import Mapping

LEGEND = (
    "Means over runs and differences paired by seed, with 95 % intervals (Student's t) and, in brackets, the number of "
    "runs or seeds; accuracies in percent. One run has no interval: chance is not ruled out."
)


def join_sections(head: str, sections: Mapping[str, str]) -> str:
    """Joins the head of a page and texts by their headings, without empty ones, to a page in Markdown."""
    blocks = [head]
    for heading, text in sections.items():
        if text:
            blocks.append(f"{heading}\n\n{text}")
    return "\n\n".join(blocks) + "\n"
