"""What a release hands out: a source archive, whose wheel has the whole package and runs on all Pythons at hand."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from fedcli.runs.options import flags_of
from fedcli.userfiles import file_hash
from tests.example_parts import PARTS_FILE, PARTS_OPTIONS

pytestmark = pytest.mark.long(worker=1)

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE_FILES = ("pyproject.toml", "README.md", "LICENSE", "fedcli", "papers")
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip makes of the source archive."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "source").mkdir()
    for name in SOURCE_FILES:
        (folder / "source" / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "source", check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"fedcli-{PROJECT['version']}.tar.gz"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", folder, archive], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_of_the_source_archive_has_every_file_of_the_package(wheel):
    assert wheel.name == f"fedcli-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()

    expected = {"fedcli/cli/my_method.txt", "fedcli/py.typed", "fedcli/papers/verdicts.csv"}
    expected |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("fedcli/**/*.py")}
    for path in (*ROOT.glob("papers/**/*.py"), *ROOT.glob("papers/*.json")):
        expected.add(f"fedcli/{path.relative_to(ROOT).as_posix()}")
    assert names == expected

    assert f"\nSummary: {PROJECT['description']}\n" in text
    assert "\nRequires-Dist: torch>=" in text
    assert re.findall(r"^Provides-Extra: (\w+)$", text, re.M) == list(PROJECT["optional-dependencies"])


def environment_without_checkout():
    """Returns the environment variables of this process, but for the path on which it finds modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Installed:
    """The wheel as a Python has it installed, away from the checkout."""

    def __init__(self, python, wheel, target):
        self.python = python
        self.environment = {**os.environ, "PYTHONPATH": str(target)}
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", target, wheel], env=environment_without_checkout(), check=True)

    def run(self, *words):
        """Runs a command of `fedcli`; returns its end, as `subprocess` does."""
        command = [self.python, "-W", "error::DeprecationWarning:fedcli", "-m", "fedcli", *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True)

    def assert_runs(self, *options):
        """Holds what every Python must give; returns the record of a run in the working folder."""
        version = self.run("--version")
        assert version.stdout.startswith(f"fedcli {PROJECT['version']}, torch "), version.stderr
        training = self.run("run", "fedavg", "--rounds", "1", *options, "--quiet", "--out", "run")
        assert training.returncode == 0, training.stderr
        record = json.loads(Path("run", "record.json").read_text())
        assert record["status"] == "finished"
        return record


@pytest.mark.slow
@pytest.mark.parametrize("name", PYTHONS)
def test_the_wheel_installs_and_runs_on_other_pythons(name, wheel, tmp_path, folder):
    """It is skipped where a Python lacks the packages that fedcli needs."""
    python = shutil.which(name)
    if python is None:
        pytest.skip("no such Python")
    needs = "import matplotlib, pandas, pip, safetensors, scipy, sklearn, torch, torchvision, typer"
    end = subprocess.run([python, "-c", needs], env=environment_without_checkout(), capture_output=True)
    if end.returncode != 0:
        pytest.skip("this Python lacks packages that fedcli needs")
    Installed(python, wheel, tmp_path / "target").assert_runs("--train-examples", "300")


@pytest.mark.slow
def test_the_wheel_runs_what_a_user_brings_beside_a_file_called_papers(wheel, tmp_path, folder):
    """The wheel has one top-level package, and what is around the working folder does not get into its way."""
    target = tmp_path / "target"
    installed = Installed(sys.executable, wheel, target)
    packages = {path.name for path in target.iterdir() if path.suffix != ".dist-info"} - {"bin"}
    assert packages == {"fedcli"}
    assert (target / "fedcli" / "py.typed").is_file()
    Path("papers.py").write_text("raise RuntimeError('not this one')\n")
    # What is a user's own is a copy, and the laws need no file of the checkout.
    shutil.copy(PARTS_FILE, "parts.py")
    text = (ROOT / "docs" / "examples" / "my_method.py").read_text()
    Path("broken.py").write_text(text.replace("fed.remember(state.clients, cohort, kept)", "state.clients"))

    record = installed.assert_runs(*flags_of(PARTS_OPTIONS))
    assert record["user_files"] == {str(Path("parts.py").resolve()): file_hash("parts.py")}
    assert record["commit"] is None  # of the installed package, not of a checkout

    assert installed.run("new", "method", "fresh").returncode == 0
    of_new_method = installed.run("check", "./fresh.py", "--device", "cpu", "--law", "9")
    assert of_new_method.stdout.endswith("\n1 of 1 laws hold on cpu.\n"), of_new_method.stderr

    of_broken = installed.run("check", "./broken.py", "--device", "cpu", "--law", "3", "--law", "5")
    assert of_broken.returncode == 1, of_broken.stderr
    assert of_broken.stderr.startswith("remembered-means, law 3: clients that took part whose state is not")
    assert of_broken.stdout.endswith("\n1 of 2 laws hold on cpu.\n")


def test_github_runs_the_same_checks_and_make_the_site():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert "- run: make docs\n" in workflow
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    steps = re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert {"lint", "test-all"} <= set(steps) <= set(targets)


def test_the_version_is_the_same_wherever_it_stands():
    version = PROJECT["version"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == version
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", released[0])
