"""How methods, protocols, tables and claims are found: by name, or in a file of the user's own."""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcli import papers  # type: ignore[attr-defined]  # the folder `papers` of a checkout, found when imported
from fedcli.declarations import Cell, Claim, DataSetting, Method, Post, Protocol, Table
from fedcli.errors import UserError, unknown
from fedcli.userfiles import import_file, is_user_module, names_user_file, path_and_name, resolve_beside


def in_declared_case(text: str, names: Collection[str]) -> str:
    """Returns the name that a text is, whatever the case of its letters; the text itself where it is none."""
    if text in names:
        return text
    by_lower_case = {name.lower(): name for name in names}
    return by_lower_case.get(text.lower(), text)


def declared_in(declaration_type: type[Any], *modules: ModuleType) -> dict[str, Any]:
    """Returns what files declare of a type, by name: of Method, each file's `METHOD`, then its `METHODS`."""
    variable = declaration_type.__name__.upper()
    declared = []
    for module in modules:
        declared.append(getattr(module, variable, None))
        declared += getattr(module, f"{variable}S", ())
    return {item.name: item for item in declared if isinstance(item, declaration_type)}


@cache
def _registered(declaration_type: type) -> dict[str, Any]:
    """Returns what the modules of `fedcli.papers` declare of a type, papers before baselines, each in order of name."""
    infos = pkgutil.walk_packages(papers.__path__, f"{papers.__name__}.")
    names = [info.name for info in infos if not info.ispkg]
    names.sort(key=lambda name: (name.count("."), name))
    modules = [importlib.import_module(name) for name in names]
    return declared_in(declaration_type, *modules)


def _find_in_file(text: str, declaration_type: type) -> Any:
    """Returns what a user's file declares of a type by its name or its variable's; without a name, the only one.

    The file becomes the home of a method or step, also where a paper has its functions.
    """
    path, name = path_and_name(text)
    registered = _registered(declaration_type).values()  # before the file is imported, which may change them
    type_name = declaration_type.__name__
    module = import_file(path, type_name.lower())
    variable = type_name.upper()
    declared = declared_in(declaration_type, module)
    by_variable = {key: value for key, value in vars(module).items() if isinstance(value, declaration_type)}
    items: dict[str, Any] = by_variable | declared
    if not items:
        raise UserError(f"the file '{path}' defines no {variable}; add {variable} = fedcli.{type_name}(...).")
    if not name:
        name = variable
        if variable not in items and len(declared) == 1:
            (name,) = declared
    if name not in items:
        choices = ", ".join(declared or items)
        raise unknown(f"{variable} in '{path}'", name, items, f"write {path}:NAME, of {choices}.")
    item = items[name]
    is_registered = any(item is other for other in registered)
    if isinstance(item, Method | Post) and not is_registered:
        item.declare_in(module)
    if declaration_type is Table:
        return replace(item, cells=tuple(_with_full_names(cell, module) for cell in item.cells))
    if declaration_type is Protocol:
        return _with_full_paths(item, Path(path).parent)
    return item


def _with_full_names(cell: Cell, module: ModuleType) -> Cell:
    """Returns a cell of a table in a user's file, with the path before the names of what the same file declares."""
    method = cell.method
    if method in declared_in(Method, module):
        method = f"{module.__file__}:{method}"
    settings = dict(cell.settings)
    for option, declaration_type in {"protocol": Protocol, "post": Post}.items():
        if settings.get(option) in declared_in(declaration_type, module):
            settings[option] = f"{module.__file__}:{settings[option]}"
    return replace(cell, method=method, settings=settings)


def _with_full_paths(protocol: Protocol, folder: Path) -> Protocol:
    """Returns a protocol of a user's file in a folder, with the paths of files that it names as seen from there."""

    def resolve_values(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {option: resolve_beside(folder, value) for option, value in settings.items()}

    def resolve_method_options(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        return {method: resolve_values(settings) for method, settings in options.items()}

    def resolve_data_setting(setting: DataSetting) -> DataSetting:
        return replace(
            setting,
            backbone=resolve_beside(folder, setting.backbone),
            settings=resolve_values(setting.settings),
            method_options=resolve_method_options(setting.method_options),
        )

    datasets = {}
    for name, setting in protocol.datasets.items():
        datasets[resolve_beside(folder, name)] = resolve_data_setting(setting)
    return replace(
        protocol,
        settings=resolve_values(protocol.settings),
        datasets=datasets,
        public={resolve_beside(folder, name): setting for name, setting in protocol.public.items()},
        method_options=resolve_method_options(protocol.method_options),
    )


def pick(name: str, noun: str, declared: Mapping[str, Any]) -> Any:
    """Returns the declaration of a name among those declared, in any case.

    Args:
        name: What the user has typed.
        noun: What a refusal calls it, as "method".
        declared: The declarations by name.

    Raises:
        UserError: There is none.
    """
    name = in_declared_case(name, declared)
    if name not in declared:
        paper, _, _ = name.lower().partition(":")
        names_in_paper = [other for other in declared if other.startswith(f"{paper}:")]
        remedy = "'fedcli list --all' shows all."
        if names_in_paper:
            remedy = f"'{paper}' has {', '.join(names_in_paper)}; {remedy}"
        raise unknown(noun, name, names_in_paper or declared, remedy)
    return declared[name]


def _find(name: str, declaration_type: type, noun: str, declared: Mapping[str, Any]) -> Any:
    """Returns the declaration of a name among those declared, or by `./file.py:NAME`."""
    return _find_in_file(name, declaration_type) if names_user_file(name) else pick(name, noun, declared)


def methods() -> dict[str, Method]:
    """Returns the registered methods by name: those of the papers, then their baselines."""
    return dict(_registered(Method))


def protocols() -> dict[str, Protocol]:
    """Returns the registered protocols by name, in the order of their files."""
    return dict(_registered(Protocol))


def tables() -> dict[str, Table]:
    """Returns the registered tables by name, in the order of their files."""
    return dict(_registered(Table))


def claims(paper: str | None = None) -> list[Claim]:
    """Returns the registered claims in the order of their files, or those of a paper or of a user's file.

    Args:
        paper: What the names of its claims begin with, in any case, or the path of a file; None for all papers.

    Raises:
        UserError: There is no such paper, or the file declares no claim.
    """
    if paper is not None and names_user_file(paper):
        path, _ = path_and_name(paper)
        module = import_file(path, "claim")
        declared = declared_in(Claim, module).values()
        if not declared:
            raise UserError(f"the file '{path}' declares no CLAIMS; add CLAIMS = (fedcli.Claim(...),).")
        full_names = {name: f"{path}:{name}" for name in declared_in(Table, module)}
        return [replace(claim, table=full_names.get(claim.table, claim.table)) for claim in declared]
    registered = list(_registered(Claim).values())
    if paper is None:
        return registered
    chosen = [claim for claim in registered if claim.name.startswith(f"{paper.lower()}:")]
    if not chosen:
        names = dict.fromkeys(claim.paper for claim in registered)
        raise unknown("paper with claims", paper, names, f"there are {', '.join(names)}, and your own ./file.py.")
    return chosen


def posts(method: Method | None = None, chosen: str | None = None) -> dict[str, Post]:
    """Returns the steps after the last round by name: registered, of a method's file, and `chosen` by `--post`."""
    steps = dict(_registered(Post))
    if method:
        steps |= declared_in(Post, method.module)
    if chosen and names_user_file(chosen):
        steps[chosen] = _find_in_file(chosen, Post)
    return steps


def find_post(name: str, method: Method | None = None) -> Post:
    """Returns the step of that name, registered or in the method's file, or by `./file.py:NAME`."""
    return _find(name, Post, "step after the last round", posts(method))


def find_table(name: str) -> Table:
    """Returns the table of that name, or by `./file.py:NAME`; its cells may name what the same file declares."""
    return _find(name, Table, "table", tables())


def find_method(name: str) -> Method:
    """Returns the method of that name, or by `./file.py:NAME`."""
    return _find(name, Method, "method", methods())


def _protocols_of_file(method: Method) -> dict[str, Protocol]:
    """The protocols of a method's file by name, then those of the file that has its function, if that is another."""
    by_name: dict[str, Protocol] = {}
    for module in (method.module, method.origin):
        for name, protocol in declared_in(Protocol, module).items():
            if is_user_module(module):
                protocol = _with_full_paths(protocol, Path(str(module.__file__)).parent)
            by_name.setdefault(name, protocol)
    return by_name


def find_protocol(name: str, method: Method | None = None) -> Protocol:
    """Returns the protocol of that name: registered, in the file of a method or its function, or `./file.py:NAME`."""
    declared = protocols()
    if method:
        declared |= _protocols_of_file(method)
    return _find(name, Protocol, "protocol", declared)


def default_protocol(method: Method, dataset: str | None) -> Protocol:
    """Returns the protocol of a method where none is named: its default, or another of the paper that has the data set.

    A method that names none, and whose file has none, takes that of the method to which it reduces. Data that no paper
    has go with `own:data`, unless the default is of a user's file.

    Args:
        method: The method.
        dataset: The data set; None for the default whatever the data.
    """
    file_protocols = _protocols_of_file(method)
    name = method.default_protocol or next(iter(file_protocols), "")
    if not name and method.reduces_to:
        simpler, _ = method.reduces_to
        return default_protocol(find_method(simpler), dataset)
    registered = protocols()
    default = find_protocol(name or "own:data", method)
    named = registered | file_protocols
    for protocol in (default, *named.values()):
        if protocol.paper == default.paper and dataset in protocol.datasets:
            return protocol
    data_of_papers: set[str] = set()
    for protocol in registered.values():
        data_of_papers.update(protocol.datasets)
    is_own_data = dataset is not None and dataset not in data_of_papers
    if is_own_data and default.name in registered:
        return find_protocol("own:data")
    return default
