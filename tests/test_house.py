"""Which room may import which, what stands in one room alone, and how large the core may be."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedcli"
FILES = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file for file in PACKAGE.rglob("*.py")}
ROOMS = ("core", "data", "runs", "results", "figures", "bench", "cli")
PROGRAMS = ("fedcli.smoke", "fedcli.check")  # on the floor of bench: they use every room below the command line
METHODS = re.compile("fedfm|fedfa|fedcme|fccl|fedsa|scaffold|feddyn|fednova|moon", re.IGNORECASE)


def floor(module: str) -> int:
    """How high a module stands; it may import from its own floor and those below."""
    parts = module.split(".")
    if module in ("fedcli", "fedcli.errors", "fedcli.userfiles", "fedcli.declarations", "fedcli.registry"):
        return 0
    if parts[1] in ROOMS:
        return 1 + ROOMS.index(parts[1])
    if module in PROGRAMS:
        return floor("fedcli.bench")
    assert module == "fedcli.__main__", f"{module} has no floor"
    return len(ROOMS) + 1


def imports(file: Path) -> set[str]:
    """The modules of this project that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES or f"{name}.__init__" in FILES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "fedcli"}


def climbing(file: Path, module: str) -> list[str]:
    """The imports of a module that lead to a higher floor."""
    return sorted(name for name in imports(file) if floor(name) > floor(module))


@pytest.mark.parametrize("module", [name for name in FILES if name != "fedcli.__init__"])
def test_imports_go_down_only(module):
    assert climbing(FILES[module], module.removesuffix(".__init__")) == []


def test_an_import_that_goes_up_is_seen_also_inside_a_function(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text("def f():\n    from fedcli.runs import records, config\n    import fedcli.core.trees\n")
    assert climbing(file, "fedcli.core.engine") == ["fedcli.runs.config", "fedcli.runs.records"]
    assert climbing(file, "fedcli.results.tables") == []


def test_papers_import_the_facade_and_baselines_alone():
    files = [*(ROOT / "papers").rglob("*.py")]
    assert len(files) > 30
    for file in files:
        others = {name for name in imports(file) if name not in ("fedcli", "fedcli.core")}
        assert all(name.startswith("fedcli.papers.baselines") for name in others), (file.name, others)


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")}
    papers = {"fedcli." + ".".join(file.parent.relative_to(ROOT).parts) for file in ROOT.glob("papers/**/__init__.py")}
    assert set(listed) == there | papers


def test_the_core_is_small_and_few_modules_stand_at_the_top():
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in (PACKAGE / "core").rglob("*.py"))
    assert 2000 < lines <= 3400
    assert len([*PACKAGE.glob("*.py")]) <= 10


def test_only_papers_name_methods():
    named = [name for name, file in FILES.items() if METHODS.search(file.read_text(encoding="utf-8"))]
    assert len(FILES) > 40
    assert named == []
    assert METHODS.search("# as in SCAFFOLD")


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"torch\.func|from torch import func", {"fedcli.core.clients", "fedcli.core.stacked"}),
        ("import typer", {name for name in FILES if name.startswith("fedcli.cli.")}),
        (r"^\s*print\(|\.print\(", {name for name in FILES if name.startswith("fedcli.cli.")}),
    ],
)
def test_what_only_one_room_does(pattern, allowed):
    found = {name for name, file in FILES.items() if re.search(pattern, file.read_text(encoding="utf-8"), re.M)}
    assert found
    assert found <= allowed
