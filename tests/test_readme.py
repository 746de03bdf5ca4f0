"""What the README shows works."""

import re
from pathlib import Path

import fedcli
from fedcli import registry
from fedcli.runs import config
from tests.programs import invoke

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_of_the_readme_is_what_new_writes_and_keeps_the_laws(folder):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "METHOD" in block]
    assert invoke("new", "method", "my_method").exit_code == invoke("new", "method", "mine").exit_code == 0
    assert Path("my_method.py").read_text() == code
    assert registry.find_method("./mine.py").name == "mine"
    result = invoke("check", "./my_method.py", "--device", "cpu")
    assert result.stdout.endswith("\n7 of 7 laws hold on cpu; 1 left out, see above.\n")
    run = fedcli.run("./my_method.py", protocol="fedfm:digits", train_examples=120, rounds=1, out="run")
    assert run.record["rounds"][0]["terms"]["norm"] > 0


def test_the_first_page_is_short():
    assert README.count("\n") <= 200


def test_every_directory_and_method_has_its_line():
    code, table = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("code.md", "methods.md"))
    directories = [folder.parent.name for folder in (ROOT / "fedcli").glob("*/__init__.py")]
    assert len(directories) == 7
    assert all(re.search(rf"^  {name}/ +\S", code, re.M) for name in directories)
    modules = [file.stem for file in (ROOT / "fedcli").glob("*.py") if not file.stem.startswith("__")]
    (top,) = re.findall(r"^fedcli/ +(.*)$", code, re.M)
    assert all(module in top for module in modules)
    assert all(f"| `{name}` |" in table for name in registry.methods())
    assert all(f"`{config.built_in(method)[1]}`" in table for method in registry.methods().values())
