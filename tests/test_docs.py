"""What README and docs/ show works: its commands, its experiment, and the examples, which are those in the texts."""

import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.core import Batch, Cohort, Federation
from fedcli.registry import default_protocol, find_method, methods
from fedcli.results import frame, plans
from fedcli.results.metrics import METRICS
from fedcli.runs import rounds
from fedcli.runs.options import RunConfig
from fedcli.runs.resolve import default_dataset, resolve
from fedcli.userfiles import from_file
from tests.programs import invoke

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLE = "docs/examples/my_method.py"
PERSONAL = "docs/examples/my_personal_method.py"
SERVER = "docs/examples/my_server_optimizer.py"
PARTS = "docs/examples/my_parts.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def blocks(text, language=""):
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if kind == language]


def commands(text):
    """The commands in a text's blocks, also of sessions and scripts, without what explains them or follows."""
    found = "".join(map("".join, (blocks(text, kind) for kind in ("", "console", "bash")))).replace("\\\n", " ")
    return [re.split(r"\s+(?:# |\|\| )", line)[0] for line in re.findall(r"^(?:\$ )?(fedcli .*)", found, re.M)]


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def example():
    return find_method(EXAMPLE).module


def test_the_experiment_is_the_one_that_the_text_describes(monkeypatch):
    setups = []

    def resolve_all(names, given, *, seeds, **experiment):
        del given["sources"]
        assert seeds == [0, 1, 2]
        setups.append(resolve(find_method(names[0]), given, need_data=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(plans, "plan_grid", resolve_all)
    lines = [line for line in commands(TEXTS["coming-from.md"]) if " run " in line and "pfllib" not in line]
    assert [invoke(*shlex.split(line)[1:]).exit_code for line in lines] == [130] * 4
    assert [setup.method.name for setup in setups] == ["fedavg", "fedprox"] * 2
    assert [setup.options.proximal_weight for setup in setups[1::2]] == [0.01, 0.01]
    assert [setup.run.cohort_size for setup in setups] == [20, 2] * 2
    as_in_pfllib = ("dirichlet:0.1:min=40", True, 0.25, 0, "clients", "best-test")
    as_in_flower = ("dirichlet:0.1:plain", False, 0, 0.2, "server", "last")
    for setup, expected in zip(setups, [as_in_pfllib] * 2 + [as_in_flower] * 2, strict=True):
        run = setup.run
        assert (run.dataset, run.num_clients, run.rounds, run.local_epochs) == ("cifar10", 20, 100, 1)
        assert (run.batch_size, run.backbone, run.optimizer, run.lr) == (10, "cnn-mcmahan", "sgd", 0.005)
        assert (run.lr_decay, run.momentum, run.weight_decay) == (1, 0, 0)
        rest = (setup.partition.flag, run.drop_last, run.local_test, run.validation, setup.protocol.evaluation)
        assert (*rest, setup.selection) == expected


def test_the_options_of_the_table_exist():
    known = {field.name for kind in (RunConfig, find_method("fedprox").config) for field in fields(kind)}
    known |= {"seeds", "out"}
    rows = [row.split("|")[3] for row in TEXTS["coming-from.md"].splitlines() if row.startswith("| ")]
    flags = {flag.replace("-", "_") for row in rows for flag in re.findall(r"`--([a-z-]+)", row)}
    assert len(flags) > 10
    assert flags <= known
    for flag in re.findall(r"`--partition ([^`]+)`", "".join(rows)):
        assert fedcli.core.partition.from_flag(flag)


def test_the_links_of_all_texts_and_pages_lead_somewhere():
    for pattern in ("README.md", "docs/*.md", "results/*.md", "results/papers/*.md"):
        for file in ROOT.glob(pattern):
            for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
                assert (file.parent / target).exists(), (file, target)
    for text in TEXTS.values():
        for path in re.findall(r"`((?:papers|tests|docs|dataset)/[\w/.]+\.py)`", text):
            assert path.startswith("dataset/") or (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    ("page", "files"), [("add-your-method.md", [EXAMPLE, PERSONAL, SERVER]), ("bring-your-own.md", [PARTS])]
)
def test_the_pieces_in_the_text_are_those_of_the_examples(page, files):
    sources = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    pieces = blocks(TEXTS[page], "python")
    assert len(pieces) >= 6
    assert [piece for piece in pieces if not any(piece in source for source in sources)] == []


def test_the_parts_of_the_example_run(tmp_path):
    own = {"backbone": f"{PARTS}:tiny", "partition": f"{PARTS}:by_halves", "dataset": f"{PARTS}:blobs"}
    given = {"protocol": "fedfm:digits", "num_clients": 4, "rounds": 2, "device": "cpu", **own}
    record = fedcli.run("fedavg", out=tmp_path / "run", log=f"{PARTS}:MyLogger", **given).record
    assert [line.split()[0] for line in (tmp_path / "run" / "rounds.txt").read_text().splitlines()] == ["1", "2"]
    classes = [[label for label, count in enumerate(counts) if count] for counts in record["partition"]["class_counts"]]
    assert classes == [[0, 1], [0, 1], [2, 3], [2, 3]]
    metric, chart = (from_file(f"{PARTS}:my_{kind}", kind) for kind in ("metric", "chart"))
    assert metric(record) == max(entry["test_accuracy"] for entry in record["rounds"])
    (line,) = chart([record]).axes[0].lines
    assert line.get_xdata().tolist() == [1, 2]


def test_equation_1_against_a_loop(example):
    draw = torch.Generator().manual_seed(0)
    features, own, shared = (torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in (5, 3, 3))
    labels, mask = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([True, True, True, True, False])
    context = example.Context(own, shared, torch.tensor([True, True, False]))
    values = [((features[i] - (own[c] + shared[c]) / 2) ** 2).sum() / 4 for i, c in ((0, 0), (1, 1), (3, 0))]
    torch.testing.assert_close(example.pull(features, labels, context, mask), sum(values) / 3)
    nothing = context._replace(has_target=torch.zeros(3, dtype=torch.bool))
    assert example.pull(features, labels, nothing) == 0


def test_equations_3_and_4_by_hand(example):
    old = example.ClientState(torch.tensor([[[2.0], [4.0], [0.0]]]), torch.tensor([[3, 5, 0]]))
    new = example.remember(old, torch.tensor([[[6.0], [9.0], [7.0]]]), torch.tensor([[2, 0, 1]]), memory=0.25)
    assert new.means.tolist() == [[[5.0], [4.0], [7.0]]]  # mixed, absent and as it was, new
    assert new.counts.tolist() == [[2, 5, 1]]
    sent = example.ClientState(
        torch.tensor([[[1.0], [2.0], [0.0]], [[4.0], [0.0], [0.0]]]), torch.tensor([[1, 2, 0], [2, 0, 0]])
    )
    means, has_class = example.gather(torch.tensor([[0.0], [0.0], [8.0]]), torch.tensor([False, False, True]), sent)
    assert means.tolist() == [[3.0], [2.0], [8.0]]
    assert has_class.tolist() == [True, True, True]
    assert example.gather(means, torch.zeros(3, dtype=torch.bool), sent)[1].tolist() == [True, True, False]


@pytest.mark.parametrize("file", [PERSONAL, SERVER])
def test_the_other_examples_keep_the_laws(file):
    laws = [word for number in (1, 2, 3, 9) for word in ("--law", str(number))]
    *_, last = invoke("check", file, "--device", "cpu", *laws).stdout.splitlines()
    assert last.startswith(("4 of 4 laws hold on cpu", "3 of 3 laws hold on cpu; 1 left out"))


def test_a_head_between_ones_own_and_the_mean_of_all_by_hand():
    mix = find_method(PERSONAL).module.mix
    mixed = mix({"weight": torch.tensor([2.0, 4.0])}, {"weight": torch.tensor([6.0, 0.0])}, own_share=0.75)
    assert mixed["weight"].tolist() == [3.0, 3.0]


def test_two_steps_of_the_server_by_hand():
    module = find_method(SERVER).module
    config = module.Config(server_lr=0.5, server_momentum=0.5)
    params, velocity = module.step({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}, {"w": torch.tensor(3.0)}, config)
    assert (params["w"], velocity["w"]) == (2.0, 2.0)  # 1 + 0.5 * 2
    params, velocity = module.step(params, velocity, {"w": torch.tensor(1.0)}, config)
    assert (params["w"], velocity["w"]) == (2.0, 0.0)  # 0.5 * 2 - 1


def test_the_page_of_what_a_method_is_given_has_a_row_for_everything_and_no_other():
    rows = re.findall(r"^\| `(\w+\.\w+)", TEXTS["what-a-method-is-given.md"], re.M)
    attributes = re.findall(r"^ {8}(\w+): ", Federation.__doc__, re.M)
    public = [*attributes, *(name for name in vars(Federation) if not name.startswith("_"))]
    fields = {f"{name}.{field}" for name, kind in (("cohort", Cohort), ("batch", Batch)) for field in kind._fields}
    assert len(attributes) > 10
    assert sorted(rows) == sorted(
        {f"fed.{name}" for name in public} | fields | {"clients.optimizer", "clients.memory", "cohort.network"}
    )


def test_the_method_of_the_readme_is_what_new_writes_and_keeps_the_laws(folder):
    assert README.count("\n") <= 200
    (code,) = [block for block in blocks(README, "python") if "METHOD" in block]
    assert invoke("new", "method", "my_method").exit_code == invoke("new", "method", "mine").exit_code == 0
    assert Path("my_method.py").read_text() == code
    assert find_method("./mine.py").name == "mine"
    *lines, last = invoke("check", "./my_method.py", "--device", "cpu").stdout.splitlines()
    assert last == "7 of 7 laws hold on cpu; 1 left out, see above."
    assert {line.split()[1] for line in lines if line.startswith("my_method ")} == set("12345679")
    assert re.search(r"branches x 4 against looped +\d\.\de-\d\d +<= 1e-08 +pass", "\n".join(lines))
    run = fedcli.run("./my_method.py", protocol="fedfm:digits", train_examples=120, rounds=1, out="run")
    assert run.record["rounds"][0]["terms"]["norm"] > 0


def test_every_directory_method_metric_and_page_has_its_line():
    code, table = TEXTS["code.md"], TEXTS["methods.md"]
    directories = [folder.parent.name for folder in (ROOT / "fedcli").glob("*/__init__.py")]
    assert len(directories) == 8
    assert all(re.search(rf"^  {name}/ +\S", code, re.M) for name in directories)
    modules = [file.stem for file in (ROOT / "fedcli").glob("*.py") if not file.stem.startswith("__")]
    (top,) = re.findall(r"^fedcli/ +(.*)$", code, re.M)
    assert all(module in top for module in modules)
    assert all(f"| `{name}` |" in table for name in methods())
    names = {default_protocol(method, default_dataset(method)).name for method in methods().values()}
    assert all(f"`{name}`" in table for name in names)
    assert [name for name in METRICS if f"`{name}" not in TEXTS["tables-and-claims.md"]] == []
    site = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in TEXTS if f"docs/{name}" not in site] == []


# The commands: those that need no network run, smaller than shown; the others resolve

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
    "data import mine": "needs a folder of images; tests/test_datasets.py makes some",
    "fedcli data download": "needs a network; tests/test_forms.py has a site of its own",
    "resume runs/first": "needs a run that was interrupted; tests/test_continue.py",
    "--kind correlation": "is for runs with public images; tests/test_correlation.py",
}
ABSENT = {"cifar10", "fmnist", "fmnist-pfllib", "./mine.npz", "./folder"}  # data sets of commands that resolve alone


@pytest.fixture
def workplace(folder, monkeypatch):
    """The folder with a user's files and some runs, as the texts suppose it; only built-in data sets are there."""
    for name, value in {"lr": "0.1", "seed": "0", "SLURM_JOB_ID": "1"}.items():  # of the scripts
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(frame, "shipped", list)  # tests/test_claims.py reads the committed records
    (folder / "docs").symlink_to(ROOT / "docs")
    (code,) = [block for block in blocks(README, "python") if "METHOD" in block]
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


def smaller(words):
    """The words of a command with what makes it small."""
    if words[0] == "--traceback":
        return [words[0], *smaller(words[1:])]
    for flag, value in SMALLER.get(words[0], {}).items():
        while flag in words:
            at = words.index(flag)
            del words[at : at + 1 + (value is not None)]
        if "--help" not in words:
            words = [*words, flag, *([] if value is None else [str(value)])]
    is_paper_table = words[0] == "table" and ":" in words[1] and "--dry-run" not in words
    return [*words, "--dry-run"] if is_paper_table else words


@pytest.mark.parametrize("name", ["README.md", *TEXTS])
def test_every_command_of_a_text_runs_or_resolves(name, workplace):
    text = {"README.md": README, **TEXTS}[name]
    for line in commands(text):
        if not any(part in line for part in LEFT_OUT):
            result = invoke(*smaller(shlex.split(os.path.expandvars(line))[1:]))
            lacks = re.match(r"error: (?:the|unknown) data set '(\S+)'", result.stderr)  # the last that is looked for
            assert lacks[1] in ABSENT if lacks else result.exit_code == 0, (line, result.output, result.exception)
    session = [code for code in blocks(text, "python") if "fedcli." in code and "METHOD" not in code]
    exec("".join(session).replace("rounds=5", "rounds=1, train_examples=300"), {})  # others are pieces of an example


def test_the_first_run_prints_what_the_readme_shows(tmp_path, monkeypatch):
    """All but the speed to the letter, and accuracies, which hang on a processor's rounding, to two points."""
    monkeypatch.chdir(tmp_path)
    (shown,) = (text for text in blocks(README, "text") if text.startswith("method      fedfm"))
    printed = invoke("run", "fedfm", "--out", "runs/first").output
    percent = re.compile(r"\d+\.\d+ %")
    number = re.compile(r"\d[\d,.:]*")
    for line in shown.splitlines():
        if line == "...":
            continue
        (same,) = [other for other in printed.splitlines() if other[:12] == line[:12]]
        accuracies, others = percent.findall(line), percent.findall(same)
        assert [float(value[:-2]) for value in others] == pytest.approx(
            [float(value[:-2]) for value in accuracies], abs=2
        )
        if not accuracies:
            assert same == line
        assert number.sub("", same) == number.sub("", line)


def test_the_texts_have_commands_and_what_is_left_out_is_in_them():
    found = [line for text in (README, *TEXTS.values()) for line in commands(text)]
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
        ("run fedavg --optimizer a", ["adam", "adamw"]),
        ("show fedsa:dig", ["fedsa:digits", "fedsa:digits-mixed"]),
    ],
)
def test_a_shell_completes_names(words, found):
    told = {"_FEDCLI_COMPLETE": "complete_bash", "COMP_WORDS": f"fedcli {words}", "COMP_CWORD": str(len(words.split()))}
    result = CliRunner().invoke(cli.app, [], prog_name="fedcli", env=told)
    assert sorted(result.stdout.split()) == sorted(found)


@pytest.mark.parametrize(
    ("names", "file"), re.findall(r"((?:`[\w.]+`(?:,| and|) )+)in `([\w/]+\.py)`", TEXTS["code.md"])
)
def test_what_the_page_on_the_code_names_is_there(names, file):
    text = (ROOT / "fedcli" / file).read_text()
    for name in re.findall(r"`([\w.]+)`", names):
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", text), f"{name} in {file}"


def test_every_name_on_the_page_on_the_code_is_in_the_code():
    files = [file for folder in ("fedcli", "papers") for file in (ROOT / folder).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files)
    words = set(re.findall(r"`([A-Za-z]+(?:_[a-z]+)+|[A-Z][a-z]+[A-Za-z]+)`", TEXTS["code.md"]))
    assert len(words) > 20
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()
