"""Writes docs/what-a-method-is-given.md from the docstrings of what a method is given: `python docs/make.py`."""

import inspect
import re
from pathlib import Path

from fedcli.core import Batch, Client, Cohort, Federation, aggregate

PAGE = Path(__file__).parent / "what-a-method-is-given.md"
HEAD = """# What a method is given

Generated from the code by `make docs`; a test keeps them equal. `init(fed, config)` and `run_round(state, cohort, fed,
config)` get a `Federation` and a `Cohort`; a local objective gets a `Batch`. `fed.config` has the options of the run,
`fed.device` and `fed.dtype` are those of its tensors. Axes: N clients in all, K in the cohort, B samples in a batch, C
classes, D features.
"""


def page() -> str:
    """Returns the page."""
    functions = [_entry(name, value) for name, value in vars(aggregate).items() if _is_of(value, aggregate)]
    attributes = re.findall(r"^ {8}(\w+): (.*)$", Federation.__doc__, re.M)
    members = [(f"fed.{name}", value) for name, value in vars(Federation).items() if not name.startswith("_")]
    calls = [_entry(name, value) for name, value in members if inspect.isfunction(value)]
    properties = [_entry(name, value) for name, value in members if isinstance(value, property)]
    tables = {
        "Methods of `fed`": calls,
        "Attributes of `fed`": [*((f"fed.{name}", text) for name, text in attributes), *properties],
        "`cohort`, the clients of a round": _fields("cohort", Cohort),
        "`batch`, of one client in its local objective": _fields("batch", Batch),
        "`clients`, while they train": _fields("clients", Client),
        "Functions of `fedcli.core` that many methods need": functions,
    }
    lines = [HEAD]
    for title, rows in tables.items():
        cells = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
        lines += [f"## {title}", "", "| | |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def _is_of(value: object, module: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _entry(name: str, member: object) -> tuple[str, str]:
    """Returns a function with its arguments, or a property, and the first line of its docstring."""
    if inspect.isfunction(member):
        parameters = [each for each in inspect.signature(member).parameters.values() if each.name != "self"]
        name += str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))
    return name, inspect.getdoc(member).splitlines()[0]


def _fields(name: str, kind: type) -> list[tuple[str, str]]:
    """Returns the fields of a NamedTuple with the comments beside them."""
    fields = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.M)
    return [(f"{name}.{field}", text) for field, text in fields]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
