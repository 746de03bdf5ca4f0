"""papers/index.json: summaries of methods, steps, protocols, tables and networks, which need no PyTorch.

Importing the papers imports PyTorch, which takes seconds. What `list`, `show`, help and completion show of them is
therefore kept in this file, which `python -m fedcli.cli.describe` writes.
"""

import json
from dataclasses import asdict, dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from fedcli import papers  # type: ignore[attr-defined]  # as in `fedcli.registry`
from fedcli.declarations import fields_of, option, spec_of

PAPERS = Path(*papers.__path__)
INDEX = PAPERS / "index.json"
KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}  # of options
SUMMARISED = ("methods", "posts")  # kinds of names that have a `Summary` each
SETUP = "set-up"  # title of the row that sums a protocol up
Rows = list[tuple[str, str]]  # of a table of titles and texts


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A method, or a step after the last round, as `show` and help describe it.

    Attributes:
        name: Its name.
        title: Its title.
        file: Its file, relative to the papers.
        config: Its options, a dataclass.
        personal: Whether each client ends with a model of its own.
        defaults: The values of a run with no option given that differ from their fields'; none for a step, and for a
            method that needs an option.
        protocols: Names and summaries of the protocols in its file, or else of the paper of its default protocol.
    """

    name: str
    title: str
    file: str
    config: type
    personal: bool
    defaults: dict[str, Any]
    protocols: Rows


@dataclass(frozen=True, kw_only=True)
class Index:
    """What papers/index.json holds, by name; each kind of names is called as the option of one, and an s.

    Attributes:
        methods: The methods.
        posts: The steps after the last round.
        protocols: What each protocol fixes.
        tables: The titles of the papers' tables.
        backbones: The names of the networks.
    """

    methods: dict[str, Summary]
    posts: dict[str, Summary]
    protocols: dict[str, Rows]
    tables: dict[str, str]
    backbones: list[str]

    def names(self, kind: str) -> list[str]:
        """List what an option of this name can be, as "method" or "backbone"; nothing if the index has no such kind."""
        return list(vars(self).get(f"{kind}s", ()))


@cache
def index() -> Index:
    """Read papers/index.json."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    for kind in SUMMARISED:
        stored[kind] = {name: _read_summary(entry) for name, entry in stored[kind].items()}
    return Index(**stored)


def index_text(content: Index) -> str:
    """Write an index as the text of papers/index.json."""
    stored = {**vars(content)}
    for kind in SUMMARISED:
        stored[kind] = {name: _summary_entry(summary) for name, summary in stored[kind].items()}
    return json.dumps(stored, indent=1, ensure_ascii=False) + "\n"


def _read_summary(entry: dict[str, Any]) -> Summary:
    options = []
    for name, stored in entry["config"].items():
        keywords = {key: value for key, value in stored.items() if key != "type"}
        options.append((name, KINDS[stored["type"]], option(**keywords)))
    config = make_dataclass("Config", options, init=False, repr=False, eq=False)
    return Summary(**{**entry, "config": config})


def _summary_entry(summary: Summary) -> dict[str, Any]:
    """Make the entry of a summary, whose options have what differs from an option that is declared by a default."""
    options = {}
    for field in fields_of(summary.config).values():
        (kind, *_) = get_args(field.type) or (field.type,)  # without what may stand behind it, None
        plain = vars(spec_of(option(field.default, "")))
        spec = vars(spec_of(field))
        changed = {key: value for key, value in spec.items() if value != plain[key]}
        options[field.name] = {"type": kind.__name__, "default": field.default, **changed}
    return {**asdict(summary), "config": options}
