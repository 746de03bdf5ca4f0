"""How methods, protocols, tables and claims are found: by name, or in a file of the user's own."""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import TypeVar

from fedcli.declarations import Claim, Method, Post, Protocol, Table
from fedcli.errors import UserError, unknown
from fedcli.userfiles import import_file, is_from_file, place


def spelt(text: str, known: Iterable[str]) -> str:
    """The known name that a text is, whatever the case of its letters; the text itself where it is none."""
    known = list(known)
    return text if text in known else {name.lower(): name for name in known}.get(text.lower(), text)


Declaration = TypeVar("Declaration", Method, Post, Protocol, Table, Claim)


def _declarations(kind: type[Declaration], *modules: ModuleType) -> dict[str, Declaration]:
    """What files declare of a kind, by name: of Method, each file's `METHOD`, then its `METHODS`."""
    name, items = kind.__name__.upper(), []
    for module in modules:
        items += [getattr(module, name, None), *getattr(module, f"{name}S", ())]
    return {item.name: item for item in items if isinstance(item, kind)}


@cache
def _registered(kind: type[Declaration]) -> dict[str, Declaration]:
    """What the modules of `fedcli.papers` declare of a kind, papers before baselines, each in order of name."""
    modules = []
    for package in ("fedcli.papers", "fedcli.papers.baselines"):
        infos = pkgutil.iter_modules(importlib.import_module(package).__path__)
        names = sorted(info.name for info in infos if not info.ispkg)
        modules += [importlib.import_module(f"{package}.{name}") for name in names]
    return _declarations(kind, *modules)


def _with_functions(module: ModuleType) -> list[Method | Post]:
    """The methods and the steps after the last round in a module, declared or in any variable."""
    items = (*_declarations(Method, module).values(), *_declarations(Post, module).values(), *vars(module).values())
    return [item for item in items if isinstance(item, Method | Post)]


def _user_module(path: str, kind: str) -> ModuleType:
    """The module of a user's file, which becomes the home of what it declares, also where a paper has the functions."""
    module = import_file(path, kind)
    for item in _with_functions(module):
        home = sys.modules[item.function.__module__]
        is_import = home is not module and any(item is other for other in _with_functions(home))
        if item._home is None and not is_import:
            object.__setattr__(item, "_home", module.__name__)  # no field, so that `replace` does not copy it
    return module


def _from_file(text: str, kind: type[Declaration]) -> Declaration:
    """What a user's file declares of a kind under the name of a variable or its own; without a name, the only one."""
    path, name = place(text)
    module = _user_module(path, kind.__name__.lower())
    declared = _declarations(kind, module)
    variables = {key: value for key, value in vars(module).items() if isinstance(value, kind)}
    names, default = {**variables, **declared}, kind.__name__.upper()
    if not names:
        example = f"{default} = fedcli.{kind.__name__}(...)"
        raise UserError(f"the file '{path}' defines no {default}; add {example}, see the README.")
    if not name and default in variables:
        return variables[default]
    if not name and len(declared) == 1:
        return next(iter(declared.values()))
    if not name:
        raise UserError(f"the file '{path}' defines several (got {', '.join(declared)}); name one: {text}:NAME.")
    if name not in names:
        raise unknown(f"{default} in '{path}'", name, names, f"there are {', '.join(declared or variables)}.")
    return names[name]


def _find(name: str, kind: type[Declaration], title: str, known: Mapping[str, Declaration]) -> Declaration:
    """The declaration of a kind by its name among those known, whatever the case, or by `./file.py:NAME`."""
    if is_from_file(name):
        return _from_file(name, kind)
    name = spelt(name, known)
    if name not in known:
        raise unknown(title, name, known, "'fedcli list' shows all.")
    return known[name]


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
        module = _user_module(path, "claim")
        claims = list(_declarations(Claim, module).values())
        if not claims:
            raise UserError(f"the file '{path}' declares no CLAIMS; add CLAIMS = (fedcli.Claim(...),).")
        for number, claim in enumerate(claims):
            if claim.table in _declarations(Table, module):
                claims[number] = dataclasses.replace(claim, table=f"{path}:{claim.table}")
        return claims
    claims = list(_registered(Claim).values())
    papers = list(dict.fromkeys(claim.name.partition(":")[0] for claim in claims))
    if paper is not None and paper.lower() not in papers:
        raise unknown("paper with claims", paper, papers, f"there are {', '.join(papers)}, and your own ./file.py.")
    return [claim for claim in claims if paper is None or claim.name.startswith(f"{paper.lower()}:")]


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
    steps = {**_registered(Post), **(_declarations(Post, method.module) if method else {})}
    return {**steps, chosen: _from_file(chosen, Post)} if chosen and is_from_file(chosen) else steps


def find_post(name: str, method: Method | None = None) -> Post:
    """The step after the last round of that name, or in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`.
        method: A method in whose file it may stand.

    Raises:
        UserError: If there is none.
    """
    return _find(name, Post, "step after the last round", posts(method))


def find_table(name: str) -> Table:
    """The table of that name, whatever the case of its letters, or the one in the file of that path.

    The methods, protocols and steps of a user's own table may stand in its file.

    Raises:
        UserError: If there is none.
    """
    table = _find(name, Table, "table", tables())
    if not is_from_file(name):
        return table
    path, cells = place(name)[0], []
    module = _user_module(path, "table")
    for cell in table.cells:
        settings = dict(cell.settings)
        for key, kind in (("protocol", Protocol), ("post", Post)):
            if settings.get(key) in _declarations(kind, module):
                settings[key] = f"{path}:{settings[key]}"
        method = f"{path}:{cell.method}" if cell.method in _declarations(Method, module) else cell.method
        cells.append(dataclasses.replace(cell, method=method, settings=settings))
    return dataclasses.replace(table, cells=tuple(cells))


def find_method(name: str) -> Method:
    """The method of that name, whatever the case of its letters, or the one in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`, where NAME is its own or that of its variable; without it, `METHOD`.

    Raises:
        UserError: If there is none, or the file does not declare one.
    """
    return _find(name, Method, "method", methods())


def find_protocol(name: str, method: Method) -> Protocol:
    """The protocol of that name, among the registered ones and those of the method's own file, or in a user's file.

    Raises:
        UserError: If there is none.
    """
    return _find(name, Protocol, "protocol", {**protocols(), **_declarations(Protocol, method.module)})


def default_protocol(method: Method, dataset: str | None) -> Protocol:
    """The protocol a method runs under where none is named.

    It is the method's default one, unless that does not know the data set and another of the same paper does.

    Args:
        method: The method.
        dataset: The data set; None for the default protocol whatever the data.
    """
    of_file = _declarations(Protocol, method.module, sys.modules[method.function.__module__])
    name = method.default_protocol or next(iter(of_file), "")
    if not name:
        raise UserError(f"the method '{method.name}' names no protocol; choose one with --protocol ('fedcli list').")
    first = find_protocol(name, method)
    if dataset is None or dataset in first.datasets:
        return first
    for protocol in {**protocols(), **of_file}.values():
        if protocol.name.split(":")[0] == first.name.split(":")[0] and dataset in protocol.datasets:
            return protocol
    return first
