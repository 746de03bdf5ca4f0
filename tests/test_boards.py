"""Mixed runs: what is selected, one table for each protocol and data set, copies counted once."""

import pytest

from fedcli.errors import UserError
from fedcli.figures import plots
from fedcli.results import frame, tables
from fedcli.results.render import render
from tests.programs import invoke
from tests.test_tables import cells, record, write

MIXED = [
    record("one"),
    record("one", dataset="letters", lr=0.2),
    record("two", dataset="letters"),
    record("two", protocol="paper:other"),
]


def test_a_board_holds_one_protocol_and_data_set():
    found = tables.boards(MIXED)
    assert [*found] == ["paper:skew, digits", "paper:skew, letters", "paper:other, digits"]
    assert [run["method"] for run in found["paper:skew, letters"]] == ["one", "two"]
    one, two, _ = tables.sheets(MIXED)
    assert (one.title, two.title) == ("paper:skew, digits", "paper:skew, letters")
    assert [row["Settings"] for row in cells("All\n\n" + render(two).split("\n\n", 2)[2])] == ["lr 0.2", "lr 0.1"]
    (alone,) = tables.sheets(MIXED[:1])
    assert alone.title == ""


def test_methods_and_data_sets_are_selected_in_any_case():
    assert tables.select_records(MIXED, ["ONE"]) == MIXED[:2]
    assert tables.select_records(MIXED, ["one", "two"], ["Letters"]) == MIXED[1:3]
    assert tables.select_records(MIXED) == MIXED
    with pytest.raises(UserError, match=r"unknown method among the runs 'on'; did you mean 'one'.*there are one, two"):
        tables.select_records(MIXED, ["on"])
    with pytest.raises(UserError, match="unknown data set among the runs 'digits'"):
        tables.select_records(MIXED[1:3], [], ["digits"])


def test_copies_of_a_run_count_once_and_other_runs_of_a_seed_each():
    runs = [record(selected=0.5), record(selected=0.5), record(seed=1, selected=0.6)]
    other = record(selected=0.7)
    other["summary"]["params_sha256"] = "f" * 64
    (group,) = tables.group([*runs, other])
    assert [run["summary"]["selected"] for run in group.records] == [0.5, 0.7, 0.6]


def test_labels_stand_for_the_methods_of_their_paths(tmp_path):
    for name, run in (("a", record(lr=0.1)), ("b", record(lr=0.2)), ("b", record(seed=1, lr=0.2))):
        write(tmp_path / name / f"seed-{run['seed']}", run)
    records = frame.find_records([tmp_path / "a", tmp_path / "b"], ["plain", "faster"])
    assert [group.label for group in tables.group(records)] == ["plain", "faster"]
    assert [len(group.records) for group in tables.group(records)] == [1, 2]
    with pytest.raises(UserError, match=r"--label stands once for each path, in order \(got 1 for 2"):
        frame.find_records([tmp_path / "a", tmp_path / "b"], ["plain"])
    write(tmp_path / "b" / "other", record(lr=0.4))
    labels = [group.label for group in tables.group(frame.find_records([tmp_path / "a", tmp_path / "b"], ["p", "q"]))]
    assert labels == ["p", "q, lr 0.4", "q, lr 0.2"]


def test_the_command_takes_all_of_it(tmp_path):
    for number, run in enumerate(MIXED):
        write(tmp_path / str(number), run)

    def call(command, *given):
        result = invoke(command, tmp_path, *given)
        return result.exit_code, result.output

    code, text = call("table", "--dataset", "digits")
    assert code == 0, text
    assert "### paper:other, digits" in text
    code, text = call("table", "--format", "csv", "--method", "one")
    assert (code, len(text.splitlines())) == (0, 3)  # one file for all
    for name in ("y.svg", "z.pdf"):
        given = ("--out", str(tmp_path / name), "--dataset", "letters", "--label", "ours")
        assert call("plot", *given) == (0, f"{tmp_path / name}\n")
    assert not (tmp_path / "z.png").exists()
    text = (tmp_path / "y.svg").read_text()
    assert "<!-- ours" in text
    assert "--out must end in .png, .pdf or .svg" in call("plot", "--out", str(tmp_path / "y.jpgg"))[1]


def test_mixed_runs_have_a_panel_for_each_board_in_which_a_method_keeps_its_look():
    bad = record("two", dataset="letters", seed=2, done=2, status="failed") | {"error": "NonFiniteLoss: the term"}
    runs = [*MIXED, record("one", seed=1), bad]
    figure = plots.learning_curves(runs)
    titles = ["Digits, Dirichlet 0.5 (paper:skew)", "Letters, Dirichlet 0.5 (paper:skew)"]
    assert [axes.get_title() for axes in figure.axes] == [*titles, "Digits, Dirichlet 0.5 (paper:other)"]
    looks = {}
    for axes in figure.axes:
        for line in axes.get_legend().get_lines():
            looks.setdefault(line.get_label().partition(" (")[0].partition(",")[0], set()).add(line.get_color())
    assert [len(own) for own in looks.values()] == [1] * len(looks)
    (cross,) = [line for axes in figure.axes for line in axes.lines if line.get_gid() == "diverged"]
    assert cross.axes is figure.axes[1]
    assert len(plots.learning_curves(MIXED[:1]).axes) == 1
    left_out = plots.learning_curves([*runs, record("three") | {"cost": None}], "floats")
    assert left_out.get_suptitle() == "without floats, left out: 1"
