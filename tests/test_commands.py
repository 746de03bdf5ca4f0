"""The commands that README and docs/ show: those that need no network run, smaller than shown; the others resolve."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.cli import display
from fedcli.data.catalog import BUILT_IN
from fedcli.registry import find_method
from fedcli.runs import rounds
from fedcli.runs.config import resolve, typed_options
from tests.programs import invoke

ROOT = Path(__file__).parent.parent
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
# What makes a command small enough for a test; what is given already is replaced.
SMALLER = {
    "run": {"--rounds": 1, "--local-epochs": 1, "--train-examples": 300, "--jobs": 1, "--quiet": None},
    "tune": {"--rounds": 1, "--local-epochs": 1, "--train-examples": 300, "--quiet": None},
    "smoke": {"--only": "fedavg"},
    "check": {"--law": 5, "--device": "cpu"},
}
LEFT_OUT = {
    "--workers": "starts processes of its own; tests/test_workers.py",
    "--on ray": "starts a cluster; tests/test_cluster.py has one",
    "fedcli bench": "takes minutes; tests/test_bench.py has small ones",
    "data import fmnist-pfllib": "needs a folder that PFLlib wrote; tests/test_splits.py makes one",
    "fedcli data download": "needs a network; tests/test_forms.py has a site of its own",
    "--kind correlation": "is for runs with public images; tests/test_correlation.py",
}


def commands(text):
    """The commands in a text's blocks, without what explains them."""
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("fedcli ")]
    return [re.sub(r"\s+# .*", "", line) for line in lines]


@pytest.fixture
def folder(folder, monkeypatch):
    """The folder with a user's files and some runs, as the texts suppose it; only built-in data sets are there."""
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    (folder / "docs").symlink_to(ROOT / "docs")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.S) if "METHOD" in block]
    for name in ("mine.py", "my_method.py"):
        Path(name).write_text(code)
    Path("nets.py").write_text((ROOT / "docs/examples/my_parts.py").read_text().replace("def tiny(", "def small("))
    Path("exp.toml").write_text('method = "fedavg"\nlr = 0.05\n')
    small = {"dataset": "digits", "rounds": 2, "local_epochs": 1, "train_examples": 300, "device": "cpu"}

    class Stops(rounds.Listener):
        def round(self, entry):
            raise KeyboardInterrupt

    fedcli.run("fedavg", out="runs/fedavg-niid-2/seed-0", drift_every=1, **small)
    with pytest.raises(KeyboardInterrupt):
        fedcli.run("fedavg", out="runs/fedavg-niid-2/seed-1", seed=1, checkpoint_every=1, progress=Stops(), **small)
    return folder


def needs_data(words):
    """Whether a `run` or `tune` needs a data set that is not built in, by the options that were typed."""
    typed = typed_options(words)
    options = {name: typed[name] for name in typed.keys() & {"protocol", "dataset", "partition", "backbone"}}
    setup = resolve(find_method(words[1].partition(",")[0]), options, need_data=False)
    return not ({setup.run.dataset, setup.run.public_dataset} <= {*BUILT_IN, None} or ".py" in setup.run.dataset)


def smaller(words):
    """The words of a command with what makes it small."""
    if words[0] == "--traceback":
        return [words[0], *smaller(words[1:])]
    for flag, value in SMALLER.get(words[0], {}).items():
        while flag in words:
            at = words.index(flag)
            del words[at : at + 2]
        if "--help" not in words:
            words = [*words, flag, *([] if value is None else [str(value)])]
    is_paper_table = words[0] == "table" and ":" in words[1] and "--dry-run" not in words
    return [*words, "--dry-run"] if is_paper_table else words


@pytest.mark.parametrize("name", list(TEXTS))
def test_every_command_of_a_text_runs_or_resolves(name, folder):
    for line in commands(TEXTS[name]):
        if any(part in line for part in LEFT_OUT):
            continue
        words = shlex.split(line)[1:]
        if words[0] in ("run", "tune") and not words[1].startswith("-") and needs_data(words):
            continue  # resolved, and what it needs is not here
        result = invoke(*smaller(words))
        assert result.exit_code == 0, (line, result.output, result.exception)


def test_the_texts_have_commands_and_what_is_left_out_is_in_them():
    found = [line for text in TEXTS.values() for line in commands(text)]
    assert len(found) > 40
    assert all(any(part in line for line in found) for part in LEFT_OUT)
    assert sum(line.startswith("fedcli run") for line in found) > 15


def test_the_version_is_told_and_help_comes_by_one_letter(folder):
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"fedcli \d+\.\d+\.\d+, torch [\d.]+\S*, Python 3\.[\d.]+\n", result.stdout)
    for words in ((), ("run", "fedavg"), ("data", "show")):
        assert invoke(*words, "-h").stdout == invoke(*words, "--help").stdout != ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("run fedf", ["fedfa", "fedfm", "fedfm-lite"]),
        ("run fedavg --dataset dig", ["digits", "digit-domains", "digits-4", "digits-real-4"]),
        ("run fedavg --optimizer a", ["adam"]),
        ("show fedsa:dig", ["fedsa:digits", "fedsa:digits-mixed"]),
    ],
)
def test_a_shell_completes_names(words, found):
    told = {"_FEDCLI_COMPLETE": "complete_bash", "COMP_WORDS": f"fedcli {words}", "COMP_CWORD": str(len(words.split()))}
    result = CliRunner().invoke(cli.app, [], prog_name="fedcli", env=told)
    assert sorted(result.stdout.split()) == sorted(found)
