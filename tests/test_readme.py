"""What the README shows works."""

import re
from pathlib import Path

import fedcli
from fedcli import registry
from fedcli.runs import config
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


def test_every_room_is_in_the_tree_and_every_method_in_the_table():
    rooms = [folder.parent.name for folder in (ROOT / "fedcli").glob("*/__init__.py")]
    assert len(rooms) == 7
    assert all(re.search(rf"^  {room}/ +\S", README, re.M) for room in rooms)
    modules = [file.stem for file in (ROOT / "fedcli").glob("*.py") if not file.stem.startswith("__")]
    (top,) = re.findall(r"^fedcli/ +(.*)$", README, re.M)
    assert all(module in top for module in modules)
    for method in registry.methods().values():
        assert f"| `{method.name}` |" in README
    built_in = {config.built_in(method)[1] for method in registry.methods().values()}
    for protocol in built_in:
        assert f"`{protocol}`" in README
