"""What README and docs/ show works: its commands, its experiment, and the examples, which are those in the texts."""

import os
import re
import shlex
from dataclasses import fields
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.core import Batch, Cohort, Federation
from fedcli.core.population import Population
from fedcli.registry import default_protocol, find_method, methods
from fedcli.results import grids, run_records
from fedcli.results.metric_kinds import METRIC_KINDS
from fedcli.runs import rounds
from fedcli.runs.options import RunConfig
from fedcli.runs.resolve import default_dataset, resolve
from fedcli.userfiles import find_user_function
from tests.commands import invoke, output_of, run_command
from tests.tensors import randn

pytestmark = pytest.mark.long(worker=0)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLE = "docs/examples/my_method.py"
PERSONAL = "docs/examples/my_personal_method.py"
SERVER = "docs/examples/my_server_optimizer.py"
PATH = "docs/examples/my_anchor_path.py"
PARTS = "docs/examples/my_parts.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def blocks(text, *languages):
    """The blocks of code in a text that are marked as one of these languages."""
    marked = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [body for language, body in marked if language in languages]


def commands(text):
    """The commands in a text's blocks, also of sessions and scripts, without what explains them or follows."""
    lines = "".join(blocks(text, "", "console", "bash")).replace("\\\n", " ")
    found = []
    for line in re.findall(r"^(?:\$ )?(fedcli .*)", lines, re.M):
        command, *_ = re.split(r"\s+(?:# |\|\| )", line)
        found.append(command)
    return found


def code_of_a_method(text):
    """The one block of code in a text that declares a method."""
    (code,) = [block for block in blocks(text, "python") if "METHOD" in block]
    return code


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def example():
    return find_method(EXAMPLE).module


# What the text describes of its experiment.
IN_ALL = {
    "dataset": "cifar10", "num_clients": 20, "rounds": 100, "local_epochs": 1, "batch_size": 10,
    "backbone": "cnn-mcmahan", "optimizer": "sgd", "lr": 0.005, "lr_decay": 1, "momentum": 0, "weight_decay": 0,
}  # fmt: skip
WITH_FEDAVG = {"method": "fedavg", "cohort_size": 20}
WITH_FEDPROX = {"method": "fedprox", "proximal_weight": 0.01, "cohort_size": 2}
AS_IN_PFLLIB = {
    "partition": "dirichlet:0.1:min=40", "drop_last": True, "local_test": 0.25, "validation": 0,
    "evaluation": "clients", "selection": "best-test",
}  # fmt: skip
AS_IN_FLOWER = {
    "partition": "dirichlet:0.1:plain", "drop_last": False, "local_test": 0, "validation": 0.2,
    "evaluation": "server", "selection": "last",
}  # fmt: skip
EXPERIMENTS = {  # in the order of their commands
    "FedAvg as in PFLlib": IN_ALL | AS_IN_PFLLIB | WITH_FEDAVG,
    "FedProx as in PFLlib": IN_ALL | AS_IN_PFLLIB | WITH_FEDPROX,
    "FedAvg as in Flower": IN_ALL | AS_IN_FLOWER | WITH_FEDAVG,
    "FedProx as in Flower": IN_ALL | AS_IN_FLOWER | WITH_FEDPROX,
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_experiment_is_the_one_that_the_text_describes(name, monkeypatch):
    setups = []

    def resolve_one(names, given, *, seeds, **experiment):
        (method,) = names
        assert seeds == [0, 1, 2]
        setups.append(resolve(find_method(method), given.values, need_data=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(grids, "plan_grid", resolve_one)
    lines = [line for line in commands(TEXTS["coming-from.md"]) if " run " in line and "pfllib" not in line]
    commands_by_name = dict(zip(EXPERIMENTS, lines, strict=True))
    _, *arguments = shlex.split(commands_by_name[name])
    assert invoke(*arguments).exit_code == 130

    (setup,) = setups
    described = {
        **setup.all_options(), "method": setup.method.name, "partition": setup.partition.flag,
        "evaluation": setup.protocol.evaluation, "selection": setup.selection,
    }  # fmt: skip
    expected = EXPERIMENTS[name]
    assert {field: described[field] for field in expected} == expected


def test_the_options_that_stand_beside_those_of_other_toolkits_exist():
    known = {field.name for field in fields(RunConfig)}
    known |= {field.name for field in fields(find_method("fedprox").config)}
    known |= {"seeds", "out"}
    column = ""
    for row in TEXTS["coming-from.md"].splitlines():
        if row.startswith("| "):
            _, _, _, ours, *_ = row.split("|")
            column += ours
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", column)}
    assert len(flags) > 10
    assert flags <= known
    for flag in re.findall(r"`--partition ([^`]+)`", column):
        assert fedcli.core.partition.from_flag(flag)


def test_the_links_of_all_texts_and_pages_lead_somewhere():
    patterns = ("README.md", "docs/*.md", "results/*.md", "results/papers/*.md")
    for file in chain.from_iterable(map(ROOT.glob, patterns)):
        text = file.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            assert (file.parent / target).exists(), (file, target)

    for text in TEXTS.values():
        for path in re.findall(r"`((?:papers|tests|docs)/[\w/.]+\.py)`", text):
            assert (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    ("page", "files"), [("add-your-method.md", [EXAMPLE, PERSONAL, SERVER, PATH]), ("bring-your-own.md", [PARTS])]
)
def test_the_pieces_in_the_text_are_those_of_the_examples(page, files):
    sources = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    pieces = blocks(TEXTS[page], "python")
    assert len(pieces) >= 6
    for piece in pieces:
        assert any(piece in source for source in sources), piece


def test_the_parts_of_the_example_run(tmp_path):
    options = {
        "protocol": "fedfm:digits", "num_clients": 4, "rounds": 2, "device": "cpu", "backbone": f"{PARTS}:tiny",
        "partition": f"{PARTS}:by_halves", "dataset": f"{PARTS}:blobs", "log": f"{PARTS}:MyLogger",
    }  # fmt: skip
    record = fedcli.run("fedavg", out=tmp_path / "run", **options).record

    first_line, second_line = (tmp_path / "run" / "rounds.txt").read_text().splitlines()
    assert first_line.startswith("1 ")
    assert second_line.startswith("2 ")

    class_counts = np.array(record["partition"]["class_counts"])
    assert (class_counts > 0).tolist() == [
        [True, True, False, False], [True, True, False, False], [False, False, True, True], [False, False, True, True]
    ]  # fmt: skip

    metric = find_user_function(f"{PARTS}:my_metric", "metric")
    assert metric(record) == max(entry["test_accuracy"] for entry in record["rounds"])

    chart = find_user_function(f"{PARTS}:my_chart", "chart")
    (axes,) = chart([record]).axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [1, 2]


def test_the_examples_pull_is_the_mean_distance_to_the_mixed_means(example):
    features = randn(5, 4, seed=0)
    own_means = randn(3, 4, seed=1)
    shared_means = randn(3, 4, seed=2)
    labels = torch.tensor([0, 1, 2, 0, 1])
    mask = torch.tensor([True, True, True, True, False])
    has_target = torch.tensor([True, True, False])
    context = example.Context(own_means, shared_means, has_target)

    distances = []
    for image, label in ((0, 0), (1, 1), (3, 0)):  # of the others one has no target, and one is masked
        target = (own_means[label] + shared_means[label]) / 2
        distances.append((features[image] - target).square().sum() / 4)
    torch.testing.assert_close(example.pull(features, labels, context, mask), sum(distances) / 3)

    without_targets = context._replace(has_target=torch.zeros(3, dtype=torch.bool))
    assert example.pull(features, labels, without_targets) == 0


def test_the_example_mixes_old_means_with_new_ones_and_takes_the_mean_over_owners(example):
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

    _, has_class = example.gather(means, torch.zeros(3, dtype=torch.bool), sent)
    assert has_class.tolist() == [True, True, False]


@pytest.mark.parametrize("file", [PERSONAL, SERVER])
def test_the_other_examples_keep_the_laws(file):
    laws = ("--law", 1, "--law", 2, "--law", 3, "--law", 9)
    *_, last = invoke("check", file, "--device", "cpu", *laws).stdout.splitlines()
    assert last.startswith(("4 of 4 laws hold on cpu", "3 of 3 laws hold on cpu; 1 left out"))


def test_the_example_of_a_path_is_fedfm_and_keeps_the_anchors_of_each_round(tmp_path):
    options = {
        "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "match_weight": 5.0, "start_round": 1,
        "device": "cpu",
    }  # fmt: skip
    state = fedcli.run(PATH, out=tmp_path / "path", rounds=2, **options).state
    after_one_round = fedcli.run("fedfm", out=tmp_path / "one", rounds=1, **options).state
    after_two_rounds = fedcli.run("fedfm", out=tmp_path / "two", rounds=2, **options).state
    assert torch.equal(state.path, torch.stack([after_one_round.anchors, after_two_rounds.anchors]))
    assert torch.equal(state.params["head.weight"], after_two_rounds.params["head.weight"])


def test_a_head_between_ones_own_and_the_mean_of_all_by_hand():
    mix = find_method(PERSONAL).module.mix
    mixed = mix({"weight": torch.tensor([2.0, 4.0])}, {"weight": torch.tensor([6.0, 0.0])}, own_share=0.75)
    assert mixed["weight"].tolist() == [3.0, 3.0]


def test_two_steps_of_the_server_by_hand():
    module = find_method(SERVER).module
    config = module.Config(server_lr=0.5, server_momentum=0.5)
    params, velocity = module.step({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}, {"w": torch.tensor(3.0)}, config)
    assert params["w"] == 2.0
    assert velocity["w"] == 2.0  # 1 + 0.5 * 2
    params, velocity = module.step(params, velocity, {"w": torch.tensor(1.0)}, config)
    assert params["w"] == 2.0
    assert velocity["w"] == 0.0  # 0.5 * 2 - 1


def test_the_page_of_methods_has_a_row_for_all_that_they_are_given_and_no_other():
    attributes = []
    methods = []
    for kind in (Population, Federation):
        attributes += re.findall(r"^ {8}(\w+): ", kind.__doc__, re.M)
        methods += [name for name in vars(kind) if not name.startswith("_")]
    assert len(attributes) > 10
    given = {f"fed.{name}" for name in (*attributes, *methods)}
    given |= {f"cohort.{field}" for field in Cohort._fields} | {"cohort.network"}
    given |= {f"batch.{field}" for field in Batch._fields}
    given |= {"clients.optimizer", "clients.memory"}

    rows = re.findall(r"^\| `(\w+\.\w+)", TEXTS["what-a-method-is-given.md"], re.M)
    assert sorted(rows) == sorted(given)


@pytest.mark.slow
def test_the_method_of_the_readme_is_what_new_writes_and_keeps_the_laws(folder):
    run_command("new", "method", "my_method")
    assert Path("my_method.py").read_text() == code_of_a_method(README)

    run_command("new", "method", "mine")
    assert find_method("./mine.py").name == "mine"

    *lines, last = invoke("check", "./my_method.py", "--device", "cpu").stdout.splitlines()
    assert last == "7 of 7 laws hold on cpu; 1 left out, see above."
    assert {line.split()[1] for line in lines if line.startswith("my_method ")} == set("12345679")
    assert re.search(r"branches x 4 against looped +\d\.\de-\d\d +<= 1e-08 +pass", "\n".join(lines))

    run = fedcli.run("./my_method.py", protocol="fedfm:digits", train_examples=120, rounds=1, out="run")
    assert run.record["rounds"][0]["terms"]["norm"] > 0


def test_the_page_on_the_code_has_a_line_for_every_directory_and_names_every_module():
    code = TEXTS["code.md"]
    directories = [folder.parent.name for folder in (ROOT / "fedcli").glob("*/__init__.py")]
    assert len(directories) == 10
    for name in directories:
        assert re.search(rf"^  {name}/ +\S", code, re.M), name
    modules = [file.stem for file in (ROOT / "fedcli").glob("*.py") if not file.stem.startswith("__")]
    (top,) = re.findall(r"^fedcli/ +(.*)$", code, re.M)
    for name in modules:
        assert name in top


def test_the_page_of_methods_names_each_with_its_protocol():
    table = TEXTS["methods.md"]
    for name, method in methods().items():
        protocol = default_protocol(method, default_dataset(method))
        assert f"| `{name}` |" in table
        assert f"`{protocol.name}`" in table


def test_the_page_on_tables_names_every_metric():
    for name in METRIC_KINDS:
        assert re.search(rf"`{name}[`:]", TEXTS["tables-and-claims.md"]), name


def test_every_page_is_on_the_site():
    site = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    for name in TEXTS:
        assert f"docs/{name}" in site


# The commands: those that need no network run, smaller than shown; the others resolve

# What makes a command small enough for a test; what is given already is replaced.
SMALLER = {
    "run": {"--rounds": 1, "--local-epochs": 1, "--train-examples": 300, "--jobs": 1, "--quiet": None},
    "tune": {"--rounds": 1, "--local-epochs": 1, "--train-examples": 300, "--jobs": 1, "--quiet": None},
    "smoke": {"--only": "fedavg"},
    "check": {"--law": 5, "--device": "cpu"},
}
LEFT_OUT = {
    "--workers": "starts processes of its own; tests/test_workers.py",
    "--on ray": "starts a cluster; tests/test_cluster.py has one",
    "fedcli bench": "takes minutes; tests/test_bench.py has small ones",
    "data import fmnist-pfllib": "needs a folder that PFLlib wrote; tests/test_partition_files.py makes one",
    "data import mine": "needs a folder of images; tests/test_datasets.py makes some",
    "fedcli data download": "needs a network; tests/test_file_formats.py has a site of its own",
    "resume runs/first": "needs a run that was interrupted; tests/test_continue.py",
    "--kind correlation": "is for runs with public images; tests/test_correlation.py",
}
ABSENT = {"cifar10", "fmnist", "fmnist-pfllib", "./mine.npz", "./folder"}  # data sets of commands that resolve alone


@pytest.fixture
def workplace(folder, monkeypatch):
    """The folder with a user's files and some runs, as the texts suppose it; only built-in data sets are there."""
    for name, value in {"lr": "0.1", "seed": "0", "SLURM_JOB_ID": "1"}.items():  # of the scripts
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_records, "find_shipped_folders", list)  # tests/test_claims.py reads the committed records

    (folder / "docs").symlink_to(ROOT / "docs")
    code = code_of_a_method(README)
    Path("mine.py").write_text(code)
    Path("my_method.py").write_text(code)
    parts = (ROOT / PARTS).read_text()
    Path("nets.py").write_text(parts.replace("def tiny(", "def small("))
    Path("exp.toml").write_text('method = "fedavg"\nlr = 0.05\n')

    class Stops(rounds.Listener):
        def round(self, entry):
            raise KeyboardInterrupt

    small = {"dataset": "digits", "rounds": 2, "local_epochs": 1, "train_examples": 300, "device": "cpu"}
    fedcli.run("fedavg", out="runs/fedavg-niid-2/seed-0", drift_every=1, **small)
    with pytest.raises(KeyboardInterrupt):
        fedcli.run("fedavg", out="runs/fedavg-niid-2/seed-1", seed=1, checkpoint_every=1, progress=Stops(), **small)
    return folder


def smaller(words):
    """The words of a command with what makes it small."""
    command, *arguments = words
    if command == "--traceback":
        return [command, *smaller(arguments)]

    for flag, value in SMALLER.get(command, {}).items():
        values = [] if value is None else [str(value)]
        while flag in arguments:
            place = arguments.index(flag)
            del arguments[place : place + 1 + len(values)]
        if "--help" not in arguments:
            arguments += [flag, *values]

    is_paper_table = command == "table" and ":" in arguments[0]
    if is_paper_table and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    return [command, *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", *TEXTS])
def test_every_command_of_a_text_runs_or_resolves(name, workplace):
    text = {"README.md": README, **TEXTS}[name]
    for line in commands(text):
        if any(part in line for part in LEFT_OUT):
            continue
        _, *words = shlex.split(os.path.expandvars(line))
        result = invoke(*smaller(words))
        absent = re.match(r"error: (?:the|unknown) data set '(\S+)'", result.stderr)  # the last that is looked for
        if absent:
            assert absent[1] in ABSENT, line
        else:
            assert result.exit_code == 0, (line, result.output, result.exception)

    # Other blocks are pieces of an example.
    session = [code for code in blocks(text, "python") if "fedcli." in code and "METHOD" not in code]
    program = "".join(session).replace("rounds=5", "rounds=1, train_examples=300").replace("jobs=2", "jobs=1")
    exec(program, {})


@pytest.mark.slow
def test_the_first_run_prints_what_the_readme_shows(tmp_path, monkeypatch):
    """All but the speed is held to the letter, and accuracies, which hang on a processor's rounding, to two points."""
    monkeypatch.chdir(tmp_path)
    (shown,) = [text for text in blocks(README, "text") if text.startswith("method      fedfm")]
    printed = invoke("run", "fedfm", "--out", "runs/first").output

    percent = re.compile(r"(\d+\.\d+) %")
    number = re.compile(r"\d[\d,.:]*")
    for expected in shown.splitlines():
        if expected == "...":
            continue
        label = expected[:12]
        (line,) = [line for line in printed.splitlines() if line.startswith(label)]
        accuracies = [float(value) for value in percent.findall(line)]
        expected_accuracies = [float(value) for value in percent.findall(expected)]
        assert accuracies == pytest.approx(expected_accuracies, abs=2)
        if not expected_accuracies:
            assert line == expected
        assert number.sub("", line) == number.sub("", expected)


def test_the_texts_have_commands_and_what_is_left_out_is_in_them():
    lines = list(chain.from_iterable(map(commands, (README, *TEXTS.values()))))
    assert len(lines) > 40
    assert sum(line.startswith("fedcli run") for line in lines) > 15
    for part in LEFT_OUT:
        assert any(part in line for line in lines), part


def test_the_version_is_told_with_those_of_torch_and_python(folder):
    line = output_of("--version")
    assert re.fullmatch(r"fedcli \d+\.\d+\.\d+, torch [\d.]+\S*, Python 3\.[\d.]+\n", line)


@pytest.mark.parametrize("command", ["", "run fedavg", "data show"])
def test_help_comes_by_one_letter(command, folder):
    text = invoke(*command.split(), "--help").stdout
    assert text
    assert invoke(*command.split(), "-h").stdout == text


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
    environment = {
        "_FEDCLI_COMPLETE": "complete_bash", "COMP_WORDS": f"fedcli {words}", "COMP_CWORD": str(len(words.split())),
    }  # fmt: skip
    result = CliRunner().invoke(cli.app, [], prog_name="fedcli", env=environment)
    assert sorted(result.stdout.split()) == sorted(found)


@pytest.mark.parametrize(
    ("names", "file"), re.findall(r"((?:`[\w.]+`(?:,| and|) )+)in `([\w/]+\.py)`", TEXTS["code.md"])
)
def test_what_the_page_on_the_code_names_is_there(names, file):
    text = (ROOT / "fedcli" / file).read_text()
    for word in re.findall(r"\w+", names):
        assert word == "and" or re.search(rf"\b{word}\b", text), f"{word} in {file}"


def test_every_name_on_the_page_on_the_code_is_in_the_code():
    files = [file for folder in ("fedcli", "papers") for file in (ROOT / folder).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files)
    words = set(re.findall(r"`([A-Za-z]+(?:_[a-z]+)+|[A-Z][a-z]+[A-Za-z]+)`", TEXTS["code.md"]))
    assert len(words) > 20
    for word in words:
        assert re.search(rf"\b{word}\b", code), word
