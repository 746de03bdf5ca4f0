"""How methods, protocols, tables and claims are found: by name, or in a file of the user's own."""

import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from fedcli.declarations import Claim, Method, Post, Protocol, Table
from fedcli.errors import UserError, unknown
from fedcli.userfiles import import_file, is_from_file, place


def spelt(text: str, known: Iterable[str]) -> str:
    """The known name that a text is, whatever the case of its letters; the text itself where it is none."""
    known = list(known)
    return text if text in known else {name.lower(): name for name in known}.get(text.lower(), text)


Declaration = TypeVar("Declaration", Method, Post, Protocol, Table, Claim)


def _module_at(path: str, kind: str) -> ModuleType:
    """The module of a user's file, whose declarations are its own from now on."""
    module = import_file(path, kind)
    _claim(module)
    return module


def _claim(module: ModuleType) -> None:
    """Make what a user's file declares its own, also where the functions are a paper's; what it imports stays."""
    for kind in (Method, Post):
        for item in _items(kind, module):
            home = sys.modules[item.function.__module__]
            if item._home is None and (home is module or not any(item is one for one in _items(kind, home))):
                object.__setattr__(item, "_home", module.__name__)  # no field, so that `replace` does not copy it


def _items(kind: type[Declaration], module: ModuleType) -> list[Declaration]:
    """What a module holds of a kind: declared, or in any variable."""
    return [one for one in (*_declarations(kind, module).values(), *vars(module).values()) if isinstance(one, kind)]


@cache
def _modules() -> tuple[ModuleType, ...]:
    """The modules of `fedcli.papers`, papers before baselines, each in order of name."""
    papers = importlib.import_module("fedcli.papers")
    found = []
    for package in (papers, importlib.import_module("fedcli.papers.baselines")):
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
            if not info.ispkg:
                found.append(importlib.import_module(f"{package.__name__}.{info.name}"))
    return tuple(found)


def _declarations(kind: type[Declaration], *modules: ModuleType) -> dict[str, Declaration]:
    """What files declare of a kind, by name: of Method, each file's `METHOD`, then its `METHODS`."""
    one = kind.__name__.upper()
    found = [item for module in modules for item in (getattr(module, one, None), *getattr(module, one + "S", ()))]
    return {item.name: item for item in found if isinstance(item, kind)}


@cache
def _registered(kind: type[Declaration]) -> dict[str, Declaration]:
    """What the registered modules declare of a kind; a plan of many runs asks for it for each."""
    return _declarations(kind, *_modules())


def _from_file(text: str, kind: type[Declaration]) -> Declaration:
    """What a user's file declares of a kind under the name of a variable or its own; without a name, the only one."""
    path, name = place(text)
    module = _module_at(path, kind.__name__.lower())
    own = _declarations(kind, module)
    variables = {key: value for key, value in vars(module).items() if isinstance(value, kind)}
    default = kind.__name__.upper()
    if not name and (default in variables or len(own) == 1):
        return variables.get(default) or next(iter(own.values()))
    if not own and not variables:
        example = f"{default} = fedcli.{kind.__name__}(...)"
        raise UserError(f"the file '{path}' defines no {default}; add {example}, see the README.")
    if not name:
        raise UserError(f"the file '{path}' defines several (got {', '.join(own)}); name one: {text}:NAME.")
    if name not in {**variables, **own}:
        raise unknown(f"{default} in '{path}'", name, {**variables, **own}, f"there are {', '.join(own or variables)}.")
    return {**variables, **own}[name]


def methods() -> dict[str, Method]:
    """The registered methods by name: those of the papers, then their baselines."""
    return dict(_registered(Method))


def protocols() -> dict[str, Protocol]:
    """The registered protocols by name, in the order of their papers' files."""
    return dict(_registered(Protocol))


def tables() -> dict[str, Table]:
    """The registered tables by name, in the order of their papers' files."""
    return dict(_registered(Table))


def claims(paper: str | None = None) -> list[Claim]:
    """The registered claims in the order of their papers' files, or those of one paper or of a user's file.

    Args:
        paper: What its claims' names begin with, whatever the case, or the path of a file; None for all papers.

    Raises:
        UserError: If there is no such paper, or the file declares no claim.
    """
    if paper is not None and is_from_file(paper):
        path = place(paper)[0]
        module = _module_at(path, "claim")
        own = _declarations(Table, module)
        found = list(_declarations(Claim, module).values())
        if not found:
            raise UserError(f"the file '{path}' declares no CLAIMS; add CLAIMS = (fedcli.Claim(...),).")
        return [dataclasses.replace(one, table=f"{path}:{one.table}") if one.table in own else one for one in found]
    known = _registered(Claim).values()
    names = list(dict.fromkeys(one.name.partition(":")[0] for one in known))
    if paper is not None and paper.lower() not in names:
        raise unknown("paper with claims", paper, names, f"there are {', '.join(names)}, and your own ./file.py.")
    return [one for one in known if paper is None or one.name.partition(":")[0] == paper.lower()]


def not_planned(module: ModuleType) -> dict[str, str]:
    """What a paper prints and no table of its file plans, each with the reason: the file's `NOT_PLANNED`.

    A key is a table of papers/reported.json, or "table: row", or "table: column"; or one that is not even there, such
    as a table of an appendix that cannot be had.
    """
    return dict(getattr(module, "NOT_PLANNED", {}))


def posts(method: Method | None = None, chosen: str | None = None) -> dict[str, Post]:
    """The steps after the last round by name: the registered ones, those of a method's file, and a user's own.

    Args:
        method: Whose file is looked into; None for none.
        chosen: What `--post` says, which may be `./file.py:NAME`.
    """
    found = {**_registered(Post), **(_declarations(Post, method.module) if method else {})}
    return {**found, chosen: _from_file(chosen, Post)} if chosen and is_from_file(chosen) else found


def find_post(name: str, method: Method | None = None) -> Post:
    """The step after the last round of that name, or in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`.
        method: A method in whose file it may stand.

    Raises:
        UserError: If there is none.
    """
    known = posts(method, name)
    name = spelt(name, known)
    if name not in known:
        raise unknown("step after the last round", name, known, "'fedcli list' shows all.")
    return known[name]


def find_table(name: str) -> Table:
    """The table of that name, whatever the case of its letters, or the one in the file of that path.

    The methods, protocols and steps of a user's own table may stand in its file.

    Raises:
        UserError: If there is none.
    """
    if is_from_file(name):
        path, table = place(name)[0], _from_file(name, Table)
        module = _module_at(path, "table")
        own = {kind: _declarations(kind, module) for kind in (Method, Protocol, Post)}

        def spelt(kind: type, value: Any) -> Any:
            return f"{path}:{value}" if value in own[kind] else value

        cells = []
        for cell in table.cells:
            named = {key: spelt(kind, cell.settings.get(key)) for key, kind in (("protocol", Protocol), ("post", Post))}
            settings = {**cell.settings, **{key: value for key, value in named.items() if key in cell.settings}}
            cells.append(dataclasses.replace(cell, method=spelt(Method, cell.method), settings=settings))
        return dataclasses.replace(table, cells=tuple(cells))
    known = {known.lower(): table for known, table in tables().items()}
    if name.lower() not in known:
        raise unknown("table", name, tables(), "'fedcli list' shows all.")
    return known[name.lower()]


def find_method(name: str) -> Method:
    """The method of that name, whatever the case of its letters, or the one in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`, where NAME is its own or that of its variable; without it, `METHOD`.

    Raises:
        UserError: If there is none, or the file does not declare one.
    """
    if is_from_file(name):
        return _from_file(name, Method)
    known = methods()
    name = spelt(name, known)
    if name not in known:
        raise unknown("method", name, known, "'fedcli list' shows all.")
    return known[name]


def find_protocol(name: str, method: Method) -> Protocol:
    """The protocol of that name, among the registered ones and those of the method's own file, or in a user's file.

    Raises:
        UserError: If there is none.
    """
    if is_from_file(name):
        return _from_file(name, Protocol)
    known = {**_registered(Protocol), **_declarations(Protocol, method.module)}
    name = spelt(name, known)
    if name not in known:
        raise unknown("protocol", name, known, "'fedcli list' shows all.")
    return known[name]


def default_protocol(method: Method, dataset: str | None) -> Protocol:
    """The protocol a method runs under where none is named.

    It is the method's default one, unless that does not know the data set and another of the same paper does.

    Args:
        method: The method.
        dataset: The data set; None for the default protocol whatever the data.
    """
    own = _declarations(Protocol, method.module, sys.modules[method.function.__module__])
    name = method.default_protocol or next(iter(own), "")
    if not name:
        raise UserError(f"the method '{method.name}' names no protocol; choose one with --protocol ('fedcli list').")
    first = find_protocol(name, method)
    if dataset is None or dataset in first.datasets:
        return first
    paper = first.name.split(":")[0]
    known = {**protocols(), **own}.values()
    same_paper = [protocol for protocol in known if protocol.name.split(":")[0] == paper]
    return next((protocol for protocol in same_paper if dataset in protocol.datasets), first)
