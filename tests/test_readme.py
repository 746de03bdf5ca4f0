"""What the README shows works."""

import re
from pathlib import Path

import pytest

import fedcli
from fedcli import registry, smoke
from tests import laws

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_of_the_readme_runs_and_reduces_to_fedavg(tmp_path):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "METHOD" in block]
    file = tmp_path / "my_method.py"
    file.write_text(code)
    run = fedcli.run(str(file), protocol="fedfm:digits", train_examples=120, rounds=1, out=tmp_path / "run")
    assert run.record["rounds"][0]["terms"]["norm"] > 0
    laws.law_1_off_is_the_simpler_method(registry.find_method(str(file)))


def test_every_module_is_in_the_tree_and_every_method_in_the_table():
    for file in (ROOT / "fedcli").glob("*.py"):
        assert file.name == "__init__.py" or f"fedcli/{file.name} " in README, file.name
    for method in registry.methods().values():
        assert f"| `{method.name}` |" in README
    built_in = {smoke.built_in(method)[0] for method in registry.methods().values()}
    for protocol in built_in:
        assert f"`{protocol}`" in README


def test_the_core_names_no_method():
    names = re.compile("fedfm|fedfa|fedcme|fccl|fedsa|scaffold|feddyn|fednova|moon", re.IGNORECASE)
    named = [file.name for file in (ROOT / "fedcli").glob("*.py") if names.search(file.read_text(encoding="utf-8"))]
    assert named == []


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"torch\.func|from torch import func", ["clients.py"]),
        ("import typer", ["cli.py"]),
        (r"^\s*print\(|\.print\(", ["cli.py", "display.py"]),
    ],
)
def test_what_only_one_module_does(pattern, allowed):
    files = sorted((ROOT / "fedcli").glob("*.py"))
    assert [file.name for file in files if re.search(pattern, file.read_text(encoding="utf-8"), re.M)] == allowed
