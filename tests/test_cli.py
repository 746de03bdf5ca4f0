"""The command line: what it shows, what it refuses, and what it passes on."""

import dataclasses
import io
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import typer
from rich.console import Console

import fedcli
from fedcli import check, declarations, registry
from fedcli.cli import app, checking, describe, display, index, printing, tables
from fedcli.cli.display import plot_run
from fedcli.cli.options import MACHINE, parse_seeds
from fedcli.cli.watching import watch
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.figures import saving
from fedcli.runs import begin, progress
from fedcli.runs.options import RunConfig, flags_of
from fedcli.runs.signals import Interrupted
from tests.commands import error_of, invoke, output_of, record_in
from tests.run_options import ONE_ROUND

pytestmark = pytest.mark.usefixtures("folder")


def in_one_line(text):
    """A text without frames, colours and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


# Help, list, show


TELLS = ["list", "show fedfm", "show fedfm:niid-1", "run fedfm --help", "tune fedfm --help"]
REFUSED = ["run fedfmm", "tune fedavg --mu 1", "run fedavg --seed -1", "run fedavg --lr x", "run fedfm --guiding x"]
PROGRAM = """
import os, sys
from fedcli.__main__ import main
for line in sys.argv[1:]:
    sys.argv = ["fedcli", *line.split()]
    os.environ.pop("_FEDCLI_COMPLETE", None)
    if not line:
        os.environ |= {"_FEDCLI_COMPLETE": "complete_bash", "COMP_WORDS": "fedcli run fedf", "COMP_CWORD": "2"}
    try:
        main()
    except SystemExit as end:
        slow = [name for name in ("torch", "pandas", "scipy", "sklearn") if name in sys.modules]
        print(f"{line}:", end.code, *slow, file=sys.__stderr__, flush=True)
"""


def test_commands_import_no_more_than_they_need(tmp_path):
    completion = ""
    run = "run fedavg --dataset digits --rounds 1 --device cpu --quiet"
    program = [sys.executable, "-c", PROGRAM, *TELLS, *REFUSED, completion, run]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)

    lines = [line for line in result.stderr.splitlines() if not line.startswith("error: ")]
    told = [f"{command}: 0" for command in TELLS]
    refused_commands = [f"{command}: 2" for command in REFUSED]
    assert lines == [*told, *refused_commands, f"{completion}: 0", f"{run}: 0 torch"]


def test_the_index_is_what_the_papers_declare():
    stored = index.INDEX.read_text(encoding="utf-8")
    assert stored == index.index_text(describe.make_index()), "'make index' writes it"


@pytest.mark.parametrize("name", list(registry.methods()))
def test_help_has_every_option_in_the_order_of_the_panels(name):
    method = registry.find_method(name)
    text = output_of("run", name, "--help")
    first_panels = ["Arguments", "Options", *([method.title] if dataclasses.fields(method.config) else [])]
    steps = list(registry.posts().values()) if method.personal is None else []
    steps_after = [f"With --post {step.name}" for step in steps]
    common_panels = ["Federation", "Local training", "Machine", "Output", "Grid", "Options from files"]
    titles = re.findall(r"^╭─ (.+?) ─+╮$", text, re.MULTILINE)
    assert titles == [*first_panels, *steps_after, *common_panels]

    configs = [RunConfig, method.config, *(step.config for step in steps)]
    for field in chain.from_iterable(map(dataclasses.fields, configs)):
        assert re.search(rf"{declarations.flag_of(field.name)}\s", text), field.name
        assert declarations.spec_of(field).help_text in in_one_line(text)


def test_help_says_symbol_source_range_off_value_need_and_default():
    text = in_one_line(output_of("run", "fedfm", "--help"))
    assert "fedcli run METHOD --help" in in_one_line(output_of("run", "--help"))
    assert "(λ, Eq. 2); >= 0; 0 switches it off. [default: 5]" in text  # fedfm:digits has it, the field 50
    assert "(α, Section IV-C); > 0; for --guiding contrastive. [default: 0.1]" in text
    assert "Learning rate; > 0. [default: 0.05]" in text
    assert "[default: fedfm:digits]" in text
    assert "--drop-last --no-drop-last" in text

    order = ("--match-weight", "--protocol", "--seed ", "--device", "--seeds ", "--out")
    assert sorted(order, key=text.index) == list(order)


COMMA_LISTS = {"--seeds", "--metric", "--columns", "--log"}
REPEATABLE = {
    "--method", "--dataset", "--label", "--only", "--grid", "--law", "--runs", "--set", "--colors", "--labels",
}  # fmt: skip


def test_exactly_the_options_that_are_lists_may_be_given_twice(capsys):
    program = typer.main.get_command(app.app)

    def repeatable(command, *words):
        flags = set()
        for option in command.params:
            flag, *_ = option.opts
            if not flag.startswith("--"):
                continue
            twice = [*words, flag, "1", flag, "2"]
            if option.multiple:
                program.make_context("fedcli", twice)  # reads them, and runs no command
                flags.add(flag)
                continue
            with pytest.raises(typer.Exit):
                program.make_context("fedcli", twice)
            remedy = f"write {flag} 1,2" if flag in COMMA_LISTS else "give it once"
            assert capsys.readouterr().err == f"error: {flag} is given twice; {remedy}.\n"
        for name, subcommand in getattr(command, "commands", {}).items():
            flags |= repeatable(subcommand, *words, name)
        return flags

    assert repeatable(program) == REPEATABLE


OPTIONS_OF_TABLES = {  # of runs, and of a paper
    "a table of runs": ["--metric", "--columns", "--digits", "--method", "--label", "--per"],
    "a paper's table": [
        "--dry-run", "--only", "--rounds", "--local-epochs", "--train-examples", "--tuned", "--records-only", "--runs",
        "--seeds", "--jobs", "--on", "--cpus-per-run", "--gpus-per-run", "--time-limit",
    ],
}  # fmt: skip


def test_help_shows_the_options_of_a_kind_of_table_together_and_each_is_refused_for_the_other():
    fit_all = {"runs", "dataset", "format", "out"}
    named = {"--per": "round", "--time-limit": "9m"}  # values that are read
    options = typer.main.get_command(app.app).commands["table"].params
    panels = {tables.RUNS: "a table of runs", tables.PAPERS: "a paper's table", MACHINE: "a paper's table"}
    shown = {purpose: [] for purpose in OPTIONS_OF_TABLES}
    for option in options:
        panel = getattr(option, "rich_help_panel", None)
        if panel is None:
            assert option.name in fit_all
            continue
        purpose = panels[panel]
        (flag,) = option.opts
        shown[purpose].append(flag)
        other = "fedfm:III" if purpose == "a table of runs" else "."
        value = [] if option.is_flag else [named.get(flag, "1")]
        assert error_of("table", other, flag, *value) == f"{flag} is for {purpose}; see 'fedcli table --help'."
    assert shown == OPTIONS_OF_TABLES


def test_no_word_of_help_becomes_a_picture():
    for command in app.app.registered_commands:  # as rich makes of :ID:
        assert max(output_of(command.name, "--help")) < "\u2600", command.name


def test_list_shows_methods_and_networks_and_with_all_the_rest(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")  # no line is broken
    short = in_one_line(output_of("list"))
    text = in_one_line(output_of("list", "--all"))
    methods = [f"{name} {method.title}" for name, method in registry.methods().items()]
    protocols = [f"{name} {protocol.summary}" for name, protocol in registry.protocols().items()]
    steps = [f"{post.name} {post.title}" for post in registry.posts().values()]
    tables = [f"{table.name} {table.title}" for table in registry.tables().values()]
    for row in (*methods, "cnn-small, "):
        assert row in short
        assert row in text
    for row in (*protocols, *steps, *tables):
        assert row not in short
        assert row in text


@pytest.mark.parametrize("name", ["fedavg", "fedfm", "fccl-plus", *registry.posts()])
def test_show_prints_options_card_and_names_of_protocols(name):
    method = registry.find_post(name) if name in registry.posts() else registry.find_method(name)
    text = output_of("show", name)
    assert text.startswith(f"{method.title}\n\nOptions of its own")

    before, _, after = text.partition(f"\n{method.module.__doc__.strip()}\n")
    for field in dataclasses.fields(method.config):
        assert f"{declarations.flag_of(field.name)} {declarations.spec_of(field).help_text}" in in_one_line(before)

    protocols = [registry.find_protocol(name) for name, _ in describe.summarise(method).protocols]
    for protocol in protocols:
        assert f"{protocol.name} {protocol.summary}" in in_one_line(after)
    has_protocols = name not in registry.posts()
    assert bool(protocols) == has_protocols
    assert bool(after) == has_protocols

    for protocol in protocols[:1]:
        text = in_one_line(output_of("show", protocol.name.upper()))
        assert f"Protocol {protocol.name} set-up {protocol.summary}" in text
        assert f"rounds {protocol.settings['rounds']}" in text
        for dataset, setting in protocol.datasets.items():
            backbone = setting.backbone.replace(",", ", ")
            assert f"{dataset} {backbone}" in text


@pytest.mark.parametrize("declaration", ["PROTOCOL = skewed", "PROTOCOLS = (skewed,)"])
def test_show_tells_of_a_method_and_of_a_protocol_in_a_file(declaration, folder):
    (folder / "mine.py").write_text(
        "from dataclasses import replace\nfrom fedcli.papers import fedfm\n"
        'METHOD = replace(fedfm.METHOD, name="mine")\nskewed = replace(fedfm.PROTOCOLS[0], name="mine:skew")\n'
        f"{declaration}\n"
    )
    text = output_of("show", "mine.py")
    assert text.startswith(registry.find_method("fedfm").title)
    protocols = text[text.index("\nProtocols (") :].splitlines()[2:]
    assert [line.split()[0] for line in protocols] == ["mine:skew"]
    assert in_one_line(output_of("show", "./mine.py:mine:skew")).startswith(
        "Protocol ./mine.py:mine:skew set-up Class shares of"
    )


# Running


def test_given_options_arrive_in_the_record(monkeypatch):
    """The rest comes from the protocol and the defaults."""
    monkeypatch.setattr(display, "plot_run", plot_run)
    given = ("--match-weight", "2.5", "--guiding", "l2", "--lr", "0.02", "--no-drop-last", "--cohort-size", "3")
    words = ("--dataset", "Digits", "--protocol", "FedFM:digits", "--backbone", "cnn-small", "--optimizer", "sgd")
    more = ("--seed", "3", "--checkpoint-every", "auto", "--out", "a/b")
    text = output_of("run", "FedFM", *flags_of(ONE_ROUND), *given, *words, *more)
    record = record_in("a/b")
    assert record["status"] == "finished"
    assert record["method"] == "fedfm"
    assert record["protocol"] == "fedfm:digits"

    expected = {
        "match_weight": 2.5, "guiding": "l2", "lr": 0.02, "drop_last": False, "cohort_size": 3, "seed": 3,
        "dataset": "digits", "backbone": "cnn-small", "optimizer": "sgd", **ONE_ROUND,
    }  # fmt: skip
    assert {name: record["config"][name] for name in expected} == expected
    assert {record["origin"][name] for name in expected} == {"command line"}
    assert record["config"]["checkpoint_every"] is None
    assert record["origin"]["momentum"] == "protocol fedfm:digits"
    assert record["origin"]["temperature"] == record["origin"]["eval_every"] == "default"
    assert "digits, 200 training images on 4 clients\nreduced     " in text

    (entry,) = record["rounds"]
    test = 100 * entry["test_accuracy"]
    validation = 100 * entry["validation_accuracy"]
    (line,) = [line for line in text.splitlines() if line.startswith("round 1/1: ")]
    assert f"test {test:.2f} %, validation {validation:.2f} %" in line
    selected = 100 * record["summary"]["selected"]
    assert f"headline    {selected:.2f} % (the round with the best validation accuracy, 1/1)" in text

    for name in ("curve", "partition"):
        assert Path(f"a/b/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_workers_share_one_run(monkeypatch):
    flags = flags_of(ONE_ROUND)
    assert "workers share one run" in error_of("run", "fedavg", *flags, "--seeds", "0,1", "--workers", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "by torchrun")
    assert "workers share one run" in error_of("run", "fedavg,fedprox", *flags)


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("7,0-2, 10 - 11") == [7, 0, 1, 2, 10, 11]


def test_ctrl_c_before_a_run_begins_leaves_nothing_of_it(monkeypatch):
    original = begin.begin

    def interrupted(setup, folder, *more):
        if folder.name == "seed-1":
            raise KeyboardInterrupt
        return original(setup, folder, *more)

    monkeypatch.setattr(begin, "begin", interrupted)
    assert invoke("run", "fedavg", *flags_of(ONE_ROUND), "--seeds", "0,1", "--out", "many").exit_code == 130
    assert [path.name for path in Path("many").glob("*")] == ["seed-0"]


# Data sets


@pytest.fixture
def shapes():
    """What the import of a data set of four classes says."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 8, 8), dtype=np.uint8)
    labels = np.arange(48) % 4
    np.savez("shapes.npz", x_train=pixels[:40], y_train=labels[:40], x_test=pixels[40:], y_test=labels[40:])
    return output_of("data", "import", "shapes", "shapes.npz")


def test_a_data_set_that_is_imported_is_listed_and_shown(shapes):
    assert "shapes: 40 training and 8 test images, 4 classes: " in shapes
    rows = [" ".join(line.split()) for line in output_of("data", "list").splitlines()]
    assert "shapes imported yes 40 8 4 1 x 8 x 8" in rows
    assert any(row.startswith("digits built-in yes ") for row in rows)
    assert any(row.startswith("cifar10 download no ") for row in rows)
    assert "images 40 to train, 8 to test shape 1 x 8 x 8 classes 4: " in in_one_line(
        output_of("data", "show", "shapes")
    )


def test_a_run_on_an_imported_data_set_says_what_that_is_made_from(shapes):
    options = ("--num-clients", "3", "--partition", "classes:2", "--rounds", "1", "--out", "a")
    text = in_one_line(output_of("run", "fedavg", "--dataset", "shapes", *options))
    assert record_in("a")["dataset"] == "shapes"
    assert record_in("a")["protocol"] == "own:data"
    assert f"data set shapes, 40 training images on 3 clients made from {Path('shapes.npz').resolve()}" in text
    assert re.search(r"headline [0-9.]+ % \(the last round\)", text)


def test_a_figure_that_fails_after_a_run_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(saving, "write_page_figure", Mock(side_effect=RuntimeError("latex was not able")))
    plot_run({}, tmp_path)
    assert "warning: the run's figures could not be drawn (latex was not able)." in in_one_line(capsys.readouterr().err)


def test_data_show_draws_a_partition():
    options = ("--partition", "classes:2", "--num-clients", 5, "--partition-seed", 3, "--out", "chart.png")
    text = output_of("data", "show", "digits", *options)
    assert "1,438 to train, 359 to test" in text
    rows = re.findall(r"^ *[0-9][0-9 ]+$", text, re.M)
    assert len(rows) == 5
    for number, row in enumerate(rows):
        client, total, *class_counts = map(int, row.split())
        assert client == number
        assert total == sum(class_counts)
    assert {path.name for path in Path.cwd().iterdir()} == {"chart.png", "chart.pdf"}


@pytest.mark.parametrize("options", [(), ("--partition", "iid", "--num-clients", 2)])
@pytest.mark.parametrize("given", ["Digits", "shapes", "./shapes.npz", "./own.py:shapes"])
def test_data_show_takes_whatever_a_run_takes_for_a_data_set(given, options, shapes):
    Path("own.py").write_text("import numpy as np\n\ndef shapes():\n    return dict(np.load('shapes.npz'))\n")
    output = output_of("data", "show", given, *options)
    assert "to train" in output
    assert ("partition iid" in output) == bool(options)


# The last line


def test_after_a_signal_only_a_line_about_an_interruption_is_printed(capsys, monkeypatch):
    by_signal = Interrupted("interrupted", 143)
    monkeypatch.setattr(printing, "interruptions", [by_signal])
    with pytest.raises(typer.Exit) as end:
        printing.stop("error: NumPy is not available.", 2)
    assert end.value.exit_code == 143
    assert capsys.readouterr().err == "interrupted.\n"

    printing.interruptions.append(by_signal)
    with pytest.raises(typer.Exit) as end:
        printing.stop_interrupted("another worker has died.", Interrupted("another worker has died", 75))
    assert end.value.exit_code == 75
    assert capsys.readouterr().err == "another worker has died.\n"

    with pytest.raises(typer.Exit) as end:
        printing.stop("error: there is no run.", 2)
    assert end.value.exit_code == 2
    assert capsys.readouterr().err == "error: there is no run.\n"


# Options that a command would not read


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("data show digits --num-clients 5", "--num-clients is for a partition (got none)"),
        ("data show digits --partition-seed 0", "--partition-seed is for a partition (got none)"),
        ("data show digits --out chart.png", "--out is for a partition (got none)"),
        ("check fedavg fedprox --all", "--all checks every method (got fedavg, fedprox beside it)"),
        ("bench fedfm --method fedprox", "--method is for workloads (got fedfm alone)"),
        ("table . --per round --metric best", "--metric is for tables of runs (got --per round, which writes a CSV)"),
        ("table . --per client --columns Method", "--columns is for tables of runs (got --per client"),
        ("table . --per round --digits 3", "--digits is for tables of runs (got --per round"),
        ("table . --per round --format latex", "--format is for tables of runs (got --per round"),
        ("table . --per round --format markdown", "--format is for tables of runs (got --per round"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(command, fault):
    assert error_of(*command.split()).startswith(fault)


# Tables and figures


def test_a_table_and_a_plot_of_runs_are_written_where_they_are_asked_for(monkeypatch):
    fedcli.run("fedavg", **ONE_ROUND, seeds=[0, 1], out="demo/one")
    text = output_of("table", "demo")
    assert re.search(r"\| \W*fedavg", text)
    assert output_of("table", "demo", "--out", "new/table.md") == "new/table.md\n"
    assert Path("new/table.md").read_text() == text
    assert output_of("plot", "demo/one") == "curves.png and curves.pdf\n"

    terminal = Console(width=76, force_terminal=True, color_system=None)
    monkeypatch.setattr("fedcli.cli.printing.console", lambda: terminal)
    drawn = output_of("table", "demo")
    assert set("|…") & set(drawn) == set()
    assert {cell for cell in re.split(r"[ |]+", text) if re.fullmatch(r"\d+\.\d+", cell)} <= set(drawn.split())


# The display


def test_the_lines_of_a_run_say_speed_and_time_left(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress, "time", Mock(perf_counter=lambda: now))
    record = fedcli.run("fedavg", **ONE_ROUND, out="a").record
    entry = {**record["rounds"][0], "test_accuracy": 0.5, "validation_accuracy": None, "terms": {"task": 1.23456}}
    entry_without_test = {**entry, "test_accuracy": None}
    record |= {"status": "running", "rounds": [entry] * 2, "config": {**record["config"], "rounds": 6}}

    out = io.StringIO()
    shown = display.Display(Console(file=out, width=40))  # narrower than the lines, which are not broken
    shown.start(record, Path("there"), samples_per_round=400, first_round=2)
    now += 10
    shown.samples(400)
    record["rounds"].append(entry)
    shown.round(entry)
    now += 10
    shown.samples(200)
    record["rounds"].append(entry_without_test)
    shown.round(entry_without_test)
    record["status"] = "interrupted"
    shown.finish(record)
    lines = out.getvalue().splitlines()
    assert lines[8:] == [
        "resumed     after 2/6 rounds",
        "round 3/6: test 50.00 %, task 1.235, 40 samples/s, 0:00:30 left",
        "round 4/6: task 1.235, 30 samples/s, 0:00:20 left",
    ]
    assert shown.folder == Path("there")  # what is to be resumed


def test_a_failure_does_not_stop_the_others_and_is_told(monkeypatch):
    def broken(state, cohort, fed, config):
        raise ArithmeticError("out of luck")

    real = registry.find_method("fedavg")
    methods = {"broken": dataclasses.replace(real, name="broken", run_round=broken), "fedavg": real}
    monkeypatch.setattr(registry, "methods", lambda: methods)
    result = invoke("smoke")
    assert result.exit_code == 1
    assert result.stdout == "1 of 2 methods ran.\n"
    assert "\n[1/2] broken, seed 0: failed: ArithmeticError: out of luck\n" in result.stderr
    assert re.search(r"^\[2/2\] fedavg, seed 0: test \d+\.\d+ % in 0:00:\d\d$", result.stderr, re.M)


# Checking the laws


def test_check_without_a_method_checks_one_of_each_kind(monkeypatch):
    monkeypatch.setattr(check, "check", lambda *given: [check.Finding("", 0, at_most=0)])
    _, *lines, _ = output_of("check", "--law", 5).splitlines()
    kinds = set()
    for line in lines:
        name, _, _ = line.partition(" 5 ")
        method = registry.find_method(name.strip())
        is_personal = method.personal is not None
        kinds.add((is_personal, method.uses_public_data))
    assert kinds >= {(False, False), (True, False), (True, True)}


# What goes wrong in a user's method

FAILING = """
from dataclasses import replace
import fedcli
from fedcli.papers.baselines import fedavg

def run_round(state, cohort, fed, config):
    fed.broadcast(state.params, state.buffers, cohort)
    return fedavg.run_round(state, cohort, fed, config)

def apply(params, buffers, fed, config):
    return params, buffers, {}["step"]

METHOD = replace(fedavg.METHOD, name="planted", run_round=run_round)
POST = fedcli.Post("broken-step", "A step", fedavg.Config, apply)
"""


@pytest.mark.parametrize(
    ("line", "planted", "words"),
    [
        ("fed.broadcast(", "fed.nothing(", "AttributeError: "),
        ("=run_round)", "=run_round, init=lambda fed, config: fed.nothing())", "AttributeError: "),
        ("=run_round)", "=run_round, model=lambda state: state.nothing)", "AttributeError: "),
        ('{}["step"]', '{}["a step"]', "KeyError: 'a step')"),
    ],
    ids=["run_round", "init", "model", "post"],
)
def test_what_a_users_method_raises_is_a_line_with_the_place(line, planted, words, folder):
    text = FAILING.replace(line, planted)
    (folder / "planted.py").write_text(text)
    before, _, _ = text.partition(planted)
    number = 1 + before.count("\n")
    result = invoke("--traceback", "run", "planted.py", *flags_of(ONE_ROUND), "--post", "broken-step", "--out", "run")
    assert result.exit_code == 2, result.output
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"error: the file '{folder / 'planted.py'}' fails in line {number} (got {words}")
    assert f'planted.py", line {number}' in result.stderr


def test_a_loss_that_is_no_number_is_not_the_fault_of_a_users_file(folder):
    (folder / "planted.py").write_text(FAILING)
    result = invoke("run", "planted.py", *flags_of(ONE_ROUND), "--lr", "1e6", "--out", "a")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert re.match(r"error: the term 'cross_entropy' .* client\(s\) 0.* record is a/record.json\.\n", result.stderr)
    assert record_in("a")["status"] == "failed"


def test_a_users_mistake_is_one_whatever_its_words_are():
    assert app._explain(UserError("there is no 'out of memory.csv'.")) == ("there is no 'out of memory.csv'.", 2)
    assert app._explain(RuntimeError("CUDA out of memory")).code == 1


def test_a_worker_without_a_display_ends_by_a_diverged_loss_without_a_traceback(capsys):
    def diverges(progress):
        raise NonFiniteLoss("the term is nan.")

    with pytest.raises(typer.Exit) as ended:
        watch(diverges, printing.Output())
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: the term is nan.\n"


def test_a_method_that_fails_has_no_figure():
    row = checking._cells(check.Failure("a label", ValueError("no")))
    assert row == ("a label", "error", "", "FAIL")
