"""Which module may import which, and what stands in one directory alone."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedcli"
FILES = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file for file in PACKAGE.rglob("*.py")}
PAPERS = {
    f"fedcli.{file.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
    for file in ROOT.glob("papers/**/*.py")
}
MODULES = {name.removesuffix(".__init__") for name in {*FILES, *PAPERS}}
# From the bottom up: a module imports from its own level and from those below.
LEVELS = (
    "errors", "files", "reading", "isolation", "vision", "userfiles", "declarations", "registry", "core", "data",
    "runs", "results", "measure", "figures", "bench", "api", "cli", "__main__",
)  # fmt: skip
LEVEL_OF = {
    "arguments": "declarations",  # it names options in messages
    "check": "bench",  # it uses every directory below the command line
    "toy": "bench",  # with which it makes runs
    "keywords": "errors",  # of which it words the messages anew
    "run_files": "files",
    "returned": "api",  # by whose functions
}
METHODS = re.compile("fedfm|fedfa|fedcme|fccl|fedsa|scaffold|feddyn|fednova|moon", re.IGNORECASE)


def level(module: str) -> int:
    """How high a module stands; the package itself, which every file of a method imports, and the papers are lowest."""
    if module in ("fedcli", "fedcli.__init__", "fedcli.papers"):
        return 0
    _, part, *_ = module.split(".")
    return LEVELS.index(LEVEL_OF.get(part, part))


def imports(file: Path) -> set[str]:
    """The modules of this project that a file imports, also inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else node.module for name in names}
    return {name for name in modules if name == "fedcli" or name.startswith("fedcli.")}


def climbing(file: Path, module: str) -> list[str]:
    """The imports of a module that lead to a higher level."""
    return sorted(name for name in imports(file) if level(name) > level(module))


@pytest.mark.parametrize("module", [name for name in FILES if name != "fedcli.__init__"])
def test_imports_go_down_only(module):
    assert climbing(FILES[module], module.removesuffix(".__init__")) == []


def test_an_import_that_goes_up_is_seen_also_inside_a_function(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text("def f():\n    from fedcli.runs import record, options\n    import fedcli.core.trees\n")
    assert climbing(file, "fedcli.core.engine") == ["fedcli.runs.options", "fedcli.runs.record"]
    assert climbing(file, "fedcli.results.tables") == []


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves by way of others."""
    reached = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return sorted(name for name, others in reached.items() if name in others)


def test_no_module_imports_itself_by_way_of_others():
    # The package is a list of names, each imported when it is asked for.
    file_of = {name.removesuffix(".__init__"): file for name, file in FILES.items() if name != "fedcli.__init__"}
    graph = {}
    for name, file in file_of.items():
        others = {other.removesuffix(".__init__") for other in imports(file)}
        graph[name] = (others & file_of.keys()) - {name}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


# What a method may import of the package: the facade, types of `fed` and `cohort`, and what kinds of methods share.
FOR_METHODS = {"fedcli", "fedcli.core"} | {
    f"fedcli.core.{name}" for name in ("class_vectors", "federation", "network_pairs", "own_models", "public_images")
}
# A method imports another one only where it is that method with something added or exchanged.
ADDS_TO = {
    "fccl_plus": {"ewc"},  # its Table 16 takes EWC as the regularizer
    "fedfm": {"fedavg", "fednova", "fedprox", "moon"},  # feature matching is added to each, Section VII-D.2
    "fedgen": {"lg_fedavg"},  # LG-FedAvg and a generator
    "ditto": {"fedprox"},  # own models by FedProx's objective around the global one
    "fedcm": {"fedavg"},  # FedAvg with momentum at the clients
    "feddecorr": {"fedavg"},  # FedAvg with a term on the features
    "fedlc": {"fedavg"},  # FedAvg with another cross-entropy
    "fednova": {"fedavg"},  # FedAvg with another mean
    "fedntd": {"fedavg"},  # FedAvg with a term on the scores
    "fedopt": {"fedavg"},  # FedAvg with another step of the server
    "fedproto_general": {"fedproto"},  # FedProto with one global model
    "fedprox": {"fedavg"},  # FedAvg with a proximal term
    "fedrs": {"fedavg"},  # FedAvg with another softmax
    "fedsam": {"fedavg", "fedcm"},  # FedAvg with a second gradient, and MoFedSAM, which is FedCM with one
    "fedtgp": {"fedproto"},  # FedProto with trained prototypes
    "pfedme": {"fedprox"},  # its Moreau envelope has FedProx's term
}


def test_a_paper_imports_what_is_for_methods_and_the_methods_that_it_adds_to():
    files = [*(ROOT / "papers").rglob("*.py")]
    assert len(files) > 30
    for file in files:
        others = imports(file) - FOR_METHODS
        methods = {name.removeprefix("fedcli.papers.baselines.") for name in others}
        assert methods == ADDS_TO.get(file.stem, set()), file.name


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")}
    for file in ROOT.glob("papers/**/__init__.py"):
        folders = file.parent.relative_to(ROOT).parts
        packages.add(".".join(("fedcli", *folders)))
    assert set(listed) == packages


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in ("ray", "report", "wandb"):
        requirements += project["optional-dependencies"][extra]
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}

    imported = set()
    for file in (*FILES.values(), *ROOT.glob("papers/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    names_in_registry = {"PIL": "pillow", "sklearn": "scikit-learn"}
    packages = set()
    for module in imported:
        name, _, _ = module.partition(".")
        packages.add(names_in_registry.get(name, name))
    assert packages - sys.stdlib_module_names - {"fedcli"} <= declared
    assert {"pandas", "bokeh", "pillow"} < packages


def test_no_file_of_tests_imports_another():
    """What tests share stands in modules that are named after what they hold."""
    importing = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            importing += [f"{file.name} imports {name}" for name in modules if re.fullmatch(r"tests\.test_\w+", name)]
    assert importing == []


def test_no_line_is_longer_than_a_screen():
    long = [name for name, file in FILES.items() if max(map(len, file.read_text().splitlines()), default=0) > 120]
    assert long == []


def test_text_is_written_and_read_in_one_encoding():
    """And not in that of the user's locale."""
    without = []
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            arguments = {argument.arg for argument in node.keywords}
            if node.func.attr in ("read_text", "write_text") and "encoding" not in arguments:
                without.append(f"{file}:{node.lineno}")
    assert without == []


def test_only_papers_name_methods():
    named = [name for name, file in FILES.items() if METHODS.search(file.read_text(encoding="utf-8"))]
    assert len(FILES) > 40
    assert named == []
    assert METHODS.search("# as in SCAFFOLD")


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        pytest.param(
            r"torch\.func|from torch import func",
            {"fedcli.core.joint_layers", "fedcli.core.network", "fedcli.core.objectives", "fedcli.core.stacked"},
            id="torch.func",
        ),
        pytest.param("import typer", {name for name in FILES if name.startswith("fedcli.cli.")}, id="typer"),
        pytest.param(
            r"^\s*print\(|\.print\(", {name for name in FILES if name.startswith("fedcli.cli.")}, id="printing"
        ),
    ],
)
def test_torch_func_typer_and_printing_stay_in_their_directories(pattern, allowed):
    modules = {name for name, file in FILES.items() if re.search(pattern, file.read_text(encoding="utf-8"), re.M)}
    assert modules
    assert modules <= allowed
