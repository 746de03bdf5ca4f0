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

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IN_SOURCE = ("pyproject.toml", "README.md", "LICENSE", "fedcli", "papers")
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip makes of the source archive."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "source").mkdir()
    for name in IN_SOURCE:
        (folder / "source" / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "source", check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"fedcli-{PROJECT['version']}.tar.gz"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", folder, archive], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_of_the_source_archive_has_every_file_of_the_package(wheel):
    assert wheel.name == f"fedcli-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    package = [path.relative_to(ROOT).as_posix() for path in (ROOT / "fedcli").rglob("*.py")]
    papers = [path.relative_to(ROOT).as_posix() for path in (ROOT / "papers").rglob("*.py")]
    data = [f"papers/{path.name}" for path in (*(ROOT / "papers").glob("*.json"), ROOT / "papers" / "verdicts.csv")]
    others = {"fedcli/cli/my_method.txt", "fedcli/py.typed"}
    assert names == {*package, *(f"fedcli/{name}" for name in (*papers, *data)), *others}
    assert f"\nSummary: {PROJECT['description']}\n" in text
    assert "\nRequires-Dist: torch>=" in text
    assert re.findall(r"^Provides-Extra: (\w+)$", text, re.M) == list(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("python", [Path(sys.executable).name, *PYTHONS])
def test_the_wheel_installs_and_runs(python, wheel, tmp_path):
    """Elsewhere than on the Python of the tests, where that has the packages that fedcli needs."""
    this = python == Path(sys.executable).name
    python = sys.executable if this else shutil.which(python)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not this:
        needs = "import matplotlib, pandas, pip, safetensors, scipy, sklearn, torch, torchvision, typer"
        ready = python and subprocess.run([python, "-c", needs], env=environment, capture_output=True).returncode == 0
        if not ready:
            pytest.skip("no such Python with the packages that fedcli needs")
    target = tmp_path / "target"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", target, wheel], env=environment, check=True)

    def told(*words):
        command = [python, "-W", "error::DeprecationWarning:fedcli", "-m", "fedcli", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(target)}, capture_output=True, text=True
        )

    version = told("--version")
    assert version.stdout.startswith(f"fedcli {PROJECT['version']}, torch "), version.stderr
    ended = told("run", "fedavg", "--rounds", "1", "--train-examples", "300", "--quiet", "--out", "run")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "finished"


def test_forks_run_the_same_checks_and_make_the_site():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert "- run: make docs\n" in workflow
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"\bmake (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))) <= set(targets)


def test_the_version_is_the_same_wherever_it_stands():
    version = PROJECT["version"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == version
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", released[0])
