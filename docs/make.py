"""Writes docs/what-a-method-is-given.md from the docstrings of what a method is given: `python docs/make.py`."""

import inspect
import re
from pathlib import Path

from fedcli.core import Batch, Client, Cohort, Federation, aggregate

PAGE = Path(__file__).parent / "what-a-method-is-given.md"
HEAD = """# What a method is given

Generated from the code by `make docs`; a test holds both equal. `init(fed, config)` and `run_round(state, cohort, fed,
config)` are given a `Federation` and a `Cohort`, a local objective a `Batch`. `fed.config` has the options of the run,
`fed.device` and `fed.dtype` are those of its tensors. Axes: N clients in all, K in the cohort, B samples in a batch, C
classes, D features.
"""


def page() -> str:
    """Returns the page."""
    own = [(name, value) for name, value in vars(Federation).items() if not name.startswith("_")]
    calls = [(f"fed.{name}{_signature(value)}", _first_line(value)) for name, value in own if inspect.isfunction(value)]
    computed = [(f"fed.{name}", _first_line(value.fget)) for name, value in own if isinstance(value, property)]
    attributes = re.findall(r"^ {8}(\w+): (.*)$", Federation.__doc__, re.M)
    public = [getattr(aggregate, name) for name in vars(aggregate) if not name.startswith("_")]
    means = [one for one in public if inspect.isfunction(one) and one.__module__ == aggregate.__name__]
    recurring = [(f"{one.__name__}{_signature(one)}", _first_line(one)) for one in means]
    parts = [
        HEAD,
        _table("`fed`, to ask for", calls),
        _table("`fed`, to look at", [*((f"fed.{name}", text) for name, text in attributes), *computed]),
        _table("`cohort`, the clients of a round", _fields("cohort", Cohort)),
        _table("`batch`, of one client in its local objective", _fields("batch", Batch)),
        _table("`clients`, while they train", _fields("clients", Client)),
        _table("From `fedcli.core`, the means that recur", recurring),
    ]
    return "\n".join(parts)


def _signature(function) -> str:
    """Returns the names of a function's arguments, with their defaults."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    shown = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(shown))


def _first_line(function) -> str:
    return inspect.getdoc(function).splitlines()[0]


def _fields(name: str, kind: type) -> list[tuple[str, str]]:
    """Returns the fields of a NamedTuple with the comments beside them."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.M)
    return [(f"{name}.{field}", text) for field, text in found]


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    cells = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *cells, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
