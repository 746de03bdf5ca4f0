"""Tables against hand numbers: what is selected and pooled, what is shown, and what is not claimed."""

import csv
import io
import re
from dataclasses import replace

import pytest

from fedcli.figures import line_charts
from fedcli.results import groups, intervals, run_records, tables
from fedcli.results.columns import FLOATS, LEAD, Layout
from fedcli.results.formats import write_tables
from fedcli.results.intervals import MeasuredRuns, find_clear_best
from fedcli.results.metrics import find_metric
from fedcli.results.notes import ACROSS_MODELS, LEADS
from fedcli.results.render import CellIndex, TextTable, render
from tests.commands import error_of, markdown_rows, output_of
from tests.example_records import as_diverged, make_record, write_unsigned_record
from tests.user_errors import raises_user_error

SELECTED = "Selected (best-validation), %"  # a column


def markdown(records, metrics=()):
    """Returns a table of records in Markdown."""
    return render(tables.build_table(records, metrics))


def csv_lines(records, metrics=()):
    """Returns the lines of a table of records in CSV, each a dictionary by column."""
    return list(csv.DictReader(io.StringIO(render(tables.build_table(records, metrics), "csv"))))


def only_row(records, metrics=()):
    """Returns the row of a table that has no other, as a dictionary by column."""
    (row,) = markdown_rows(markdown(records, metrics))
    return row


def bold_methods(records):
    """Returns the names of methods that stand in bold in a table."""
    return [row["Method"] for row in markdown_rows(markdown(records)) if row["Method"].startswith("**")]


def records_of(name, *accuracies, **options):
    """Returns records of a method with these accuracies, a seed each."""
    return [make_record(name, seed=seed, selected=value, **options) for seed, value in enumerate(accuracies)]


def latex(records, metrics=(), **layout):
    """Returns a table of records in LaTeX."""
    return write_tables(records, metrics, "latex", Layout(**layout))


def make_diverged_record(seed=0, selected=0.5, *, rounds_done=2, selection="best-validation", **options):
    """Returns the record of a run that diverged, whose headline is by `selection`."""
    record = make_record(seed=seed, selected=selected, rounds_done=rounds_done, **options)
    record["summary"]["selection"] = selection
    return as_diverged(record)


def test_means_and_sample_deviations_of_known_values():
    # 50, 52, 57: mean 53, sample variance (9 + 1 + 16) / 2 = 13
    row = only_row(records_of("one", 0.5, 0.52, 0.57))
    assert row[SELECTED] == "53.00 ± 3.61 (3)"
    assert row["Last round, %"] == "33.00 ± 3.61 (3)"
    assert row["validation, %"] == "58.00 ± 3.61 (3)"
    assert row["Seeds"] == "0, 1, 2"
    assert row["Rounds"] == "4"
    assert row["Floats up / down, client and round"] == "12,400 / 12,345"

    first, second = markdown_rows(render(tables.build_table(records_of("one", 0.5, 0.123456), by_seed=True)))
    assert first["Seeds"] == "0"
    assert first[SELECTED] == "50.00 (1)"
    assert second["Seeds"] == "1"
    assert second[SELECTED] == "12.35 (1)"


def test_seconds_are_the_median_round_of_quiet_runs():
    quiet = make_record()
    older = make_record(seed=1) | {"load": [{"round": 0, "start": 9.0, "end": 9.0, "others": 0.2}]}
    noisy = make_record(seed=1) | {"load": [{"round": 0, "start": 0.1, "end": 1.6}]}
    unknown = make_record()
    del unknown["load"]  # from before it was measured

    lines = csv_lines([quiet, older, noisy, unknown])

    # not moved by 61 s of warming up
    assert [line["seconds_round_median"] for line in lines] == ["2.0", "2.0", "", ""]
    assert [line["seconds_total"] for line in lines] == ["66.0", "66.0", "", ""]


def test_the_seed_and_what_follows_it_do_not_divide_a_group():
    """Another seed of the partition does."""
    records = [
        make_record(seed=2, device="cpu"),
        make_record(seed=0, device="cuda"),
        make_record(seed=1, device="auto"),
    ]
    (group,) = groups.group_runs(records)
    assert [record["seed"] for record in group.records] == [0, 1, 2]
    assert group.differing_settings == {}
    assert group.title == "one"

    fixed = {"partition_seed": 7, "origin": {"partition_seed": "command line"}}
    following, other = groups.group_runs(
        [make_record(seed=0), make_record(seed=0, **fixed), make_record(seed=1, **fixed)]
    )
    assert following.differing_settings == {"partition_seed": "as seed"}
    assert other.title == "one, partition seed 7"
    assert len(other.records) == 2


def test_other_numerics_are_another_group_and_another_hash_is_not():
    reworded = make_record(seed=1) | {"method_hash": "changed!" * 8}
    of_other_numerics = make_record(seed=2) | {"numerics": {"core": 1, "method": 2}}
    first, second = groups.group_runs([make_record(), reworded, of_other_numerics])
    assert first.differing_settings == {"numerics": "1.1"}
    assert len(first.records) == 2
    assert second.differing_settings == {"numerics": "1.2"}
    assert len(second.records) == 1

    # Of a user's own file nobody counts versions.
    users = {"method_source": "/me/one.py"}
    records = [
        make_record(seed=0) | users | {"method_hash": "a" * 8},
        make_record(seed=1) | users | {"method_hash": "b" * 8},
    ]
    assert [group.differing_settings for group in groups.group_runs(records)] == [{"code": "a" * 8}, {"code": "b" * 8}]


def test_labels_hold_what_differs_and_no_more():
    def labels(*records):
        return [group.title for group in groups.group_runs(records)]

    one = make_record("one")
    two = make_record("two", mu=1)
    assert labels(one, two) == ["one", "two"]  # an option that only one method has tells nothing
    assert labels(one, two, make_record("two", mu=0.5)) == ["one", "two, mu 1", "two, mu 0.5"]

    # What most of them have is left out.
    assert labels(one, make_record(drop_last=True), make_record(partition="iid")) == [
        "one",
        "one, drop last on",
        "one, iid",
    ]
    records = [
        make_record("one"),
        make_record("two"),
        make_record("two", lr=0.2),
        make_record("two", lr=0.2, drop_last=True),
    ]
    assert labels(*records)[1] == "two, lr 0.1"  # half are not more than half
    assert labels(*records, make_record("three"))[1] == "two"


def test_of_a_diverged_run_the_best_round_on_validation_counts_and_no_other():
    records = [make_record(selected=0.5), make_diverged_record(1, 0.4), make_diverged_record(2, rounds_done=0)]
    row = only_row(records)
    assert row[SELECTED] == "45.00 ± 7.07 (2 of 3 runs; 2 diverged)"  # one ended before any round was tested
    assert row["Last round, %"] == "30.00 (1 of 3 runs; 2 diverged)"
    assert row["Seeds"] == "0, 1 diverged after 2 rounds, 2 diverged after 0 rounds"
    assert "Diverged: a loss became infinite or NaN." in markdown(records)
    assert only_row([make_diverged_record(selection="last")])["Selected (last), %"] == "diverged"

    stopped = make_record(seed=3, selected=0.9, status="interrupted", rounds_done=2)
    row = only_row([make_record(selected=0.5), stopped])
    assert row[SELECTED] == "50.00 (1 of 2 runs)"
    assert row["Seeds"] == "0, 3 unfinished after 2 rounds"

    records = [
        *records_of("one", 0.5, 0.5),
        make_diverged_record(0, 0.6, method="two"),
        make_diverged_record(1, 0.6, method="two"),
    ]
    assert bold_methods(records) == ["**two**"]
    for record in records:
        record["summary"]["selection"] = "last"
    assert bold_methods(records) == []


def test_metrics_that_are_asked_for_get_columns_and_a_copy_of_each_record(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def peak(record):\n    return 7 * len(record['rounds'])\n"
        "def word(record):\n    return 'x'\n"
        "def nan(record):\n    return float('nan')\n"
        "def clears(record):\n    return record['rounds'].clear() or 1\n"
    )
    row = only_row(records_of("one", 0.5, 0.52), ["best", f"{file}:peak", f"{file}:nan"])
    assert row["best, %"] == "51.00 ± 1.41 (2)"
    assert row["peak"] == "28.000 ± 0.000 (2)"
    assert row["nan"] == "not measured (2)"

    (line,) = csv_lines([make_record()], [f"{file}:clears", f"{file}:peak"])
    assert line["peak"] == "28"  # each metric has a copy of the record
    assert only_row([make_record()], ["quality:nmi"])["quality:nmi"] == "not measured (1)"
    with raises_user_error("'word' is no number (got str); return one or None"):
        tables.build_table([make_record()], [f"{file}:word"])


def test_a_metric_of_a_name_that_no_run_has_is_refused():
    """A name that some of the runs have is one, and so is any name where no run has measured one."""
    record = make_record("one", selected=0.5)
    measured = make_record("two", selected=0.6)
    measured["rounds"] = [{**entry, "terms": {"anchor": 2.0}} for entry in measured["rounds"]]
    assert "not measured" in write_tables([record], ["term:anchor"])
    assert "2.000" in write_tables([record, measured], ["term:anchor"])
    with raises_user_error("unknown term among the runs 'anchors'; did you mean 'anchor'? there are anchor."):
        write_tables([record, measured], ["term:anchors"])
    with raises_user_error("unknown class among the runs 'nobody'"):
        write_tables([measured], ["class:nobody"], "csv")
    with raises_user_error("unknown class among the runs 'nobody'"):
        tables.tabulate_numbers([record | {"folder": "run"}], ["class:nobody"])


def test_a_metric_whose_name_a_column_has_is_refused(tmp_path):
    for name in ("one.py", "two.py"):
        definitions = [
            f"def {word}(record):\n    return 7\n" for word in ("seed", "parameters", "score", "final_score")
        ]
        (tmp_path / name).write_text("".join(definitions))
    record = make_record()
    for word in ("seed", "parameters"):
        refused = [f"{tmp_path}/one.py:{word}"]
        with raises_user_error(f"has a column '{word}' already"):
            csv_lines([record], refused)
    scores = [f"{tmp_path}/one.py:score", f"{tmp_path}/two.py:score"]
    with raises_user_error("two metrics are called 'score'"):
        csv_lines([record], scores)

    (line,) = csv_lines([record], [scores[0], scores[0]])
    assert line["score"] == "7"
    assert "& Final score" in latex([record], [f"{tmp_path}/one.py:final_score"])


def test_what_is_said_of_runs_is_escaped_once_in_each_format():
    table = TextTable(["A"], [["a"]], (), notes=["FedAvg* failed:\n<b>"], caption="FedAvg* changed.")
    assert r"- FedAvg\* failed:\\n\<b\>" in render(table).splitlines()
    latex_lines = render(table, "latex").splitlines()
    assert r"% FedAvg* failed:\n<b>" in latex_lines
    assert r"\caption{FedAvg* changed.}" in latex_lines
    labelled = [record | {"label": "FedAvg*"} for record in (make_record(selected=0.5), make_record(selected=0.7))]
    labelled[1]["summary"] = {**labelled[1]["summary"], "params_sha256": "f" * 64}
    assert "- FedAvg\\* has 2 runs of seed 0" in markdown(labelled)
    assert "% FedAvg* has 2 runs of seed 0" in latex(labelled)
    assert "over runs (number of runs)" in latex(labelled)  # not "over seeds 0 and 0"


def test_qualities_of_different_rounds_have_no_mean_and_are_told_apart():
    def measured(method, seed, **quality):
        return make_record(method, seed) | {"quality": {"nmi": 0.5, **quality}}

    def shown(*records):
        return [row["quality:nmi"] for row in markdown_rows(markdown(records, ["quality:nmi"]))]

    def has_note(*records):
        return "which do not compare: 'fedcli quality'" in markdown(records, ["quality:nmi"])

    older = measured("one", 0)  # of the last round
    selected = measured("one", 1, round=1)
    last = measured("one", 1, round=3)
    assert shown(older, selected) == ["of different rounds (2)"]
    assert has_note(older, selected)
    assert "of the last round's models of one (seed 0) and" in markdown([older, selected], ["quality:nmi"])
    assert shown(older, last) == ["0.500 ± 0.000 (2)"]
    assert not has_note(older, last)

    of_other_method = measured("two", 0, round=1)
    assert shown(older, of_other_method) == ["0.500 (1)", "0.500 (1)"]
    assert has_note(older, of_other_method)
    quality = find_metric("quality:nmi")
    difference = intervals.paired_difference(MeasuredRuns(quality, [older]), MeasuredRuns(quality, [of_other_method]))
    assert difference == intervals.NO_INTERVAL

    both = measured("one", 1, round=3)
    both["summary"]["selected_round"] = 3  # the headline is of the last round
    for other in (older, selected | {"seed": 0}):
        assert shown(other, both) == ["0.500 ± 0.000 (2)"]
        assert not has_note(other, both)


def test_the_best_comparable_row_is_bold_where_its_lead_is_certain():
    """A lead is certain if its interval leaves out zero."""
    one = records_of("one", 0.5, 0.6, 0.7)
    three = records_of("three", 0.1, 0.2, 0.3)
    sure_two = records_of("two", 0.53, 0.64, 0.75)  # ahead of one by 3, 4 and 5
    unsure_two = records_of("two", 0.51, 0.64, 0.74)  # by 1, 4 and 4: zero is in the interval
    assert bold_methods([*one, *sure_two, *three]) == ["**two**"]
    assert bold_methods([*one, *unsure_two, *three]) == []
    last = find_metric("last")
    lower = replace(last, kind=replace(last.kind, better="lower"))
    measured_one = MeasuredRuns(lower, one)
    assert find_clear_best({"one": measured_one, "two": MeasuredRuns(lower, sure_two)}) == "one"
    assert find_clear_best({"one": measured_one, "two": MeasuredRuns(lower, unsure_two)}) is None

    # Each group by its own metric, as the cells of a paper's column may have two.
    with_post = [record | {"post": {"test_accuracy": 0.9 + record["seed"] / 100}} for record in one]
    groups = {"plain": MeasuredRuns(last, sure_two), "with a step": MeasuredRuns(find_metric("post"), with_post)}
    assert find_clear_best(groups) == "with a step"

    # One seed has no interval, other seeds are no pairs, and a lost run is no lead.
    assert bold_methods([make_record("one", selected=0.5), make_record("two", selected=0.6)]) == []
    of_other_seeds = [make_record("two", seed=seed, selected=0.9 + seed / 1000) for seed in (7, 8, 9)]
    assert bold_methods([*one, *of_other_seeds]) == []
    lead = [*records_of("one", 0.5, 0.5), *records_of("two", 0.6, 0.6)]
    assert bold_methods(lead) == ["**two**"]
    assert bold_methods([*lead, make_diverged_record(9, rounds_done=0, method="two")]) == []

    # Each data set has its own best.
    on_a = [*records_of("one", 0.5, 0.5, dataset="a"), *records_of("two", 0.6, 0.6, dataset="a")]
    on_b = [*records_of("one", 0.9, 0.9, dataset="b"), *records_of("two", 0.8, 0.8, dataset="b")]
    assert bold_methods(on_a + on_b) == ["**two**", "**one**"]
    assert "Bold: the best mean among rows with the same protocol" in markdown(on_a + on_b)


def test_rows_that_cannot_be_compared_are_not_bold_and_told_apart():
    of_other_selection = records_of("two", 0.6, 0.6, selection="last")
    for record in of_other_selection:
        record["summary"]["selection"] = "last"
    others = {
        "iid": records_of("two", 0.6, 0.6, partition="iid"),
        "rounds 5": records_of("two", 0.6, 0.6, rounds=5),
        "train examples 9": records_of("two", 0.6, 0.6, train_examples=9),
        "selection last": of_other_selection,
    }

    for difference, records in others.items():
        text = markdown([*records_of("one", 0.5, 0.5), *records])
        assert difference in text
        assert "**" not in text


def test_csv_has_one_line_a_run_in_full_precision():
    records = [
        make_record("one", selected=1 / 3),
        make_record("two", seed=1, mu=0.25, status="interrupted", rounds_done=2),
    ]
    first, second = csv_lines(records)
    assert float(first["selected"]) == pytest.approx(100 / 3, rel=1e-15)
    assert first["selected_round"] == "2"
    assert float(first["validation_accuracy"]) == pytest.approx(100 / 3 + 5)
    assert first["params_sha256"] == "0" * 64
    assert first["config.mu"] == ""
    assert second["config.mu"] == "0.25"
    assert second["status"] == "interrupted"
    assert second["rounds_done"] == "2"
    assert second["config.rounds"] == "4"

    (reduced,) = csv_lines([make_record(protocol="fedfm:digits", rounds=20, train_examples=100)])
    assert reduced["reduced"] == "training images 100 of 1,438"


def test_latex_is_booktabs_with_everything_escaped():
    labelled = [record | {"label": "my_method <A & 50 % {B}>"} for record in records_of("two", 0.6, 0.62)]
    lines = latex([*records_of("one", 0.5, 0.52), *labelled]).splitlines()
    assert lines[0] == "% All rows: protocol paper:skew, dataset digits, partition dirichlet:0.5."
    assert lines[2] == r"\begin{table}"
    assert lines[5] == r"\label{tab:paper-skew-digits}"
    assert lines[7] == r"\begin{tabular}{lrrr}"
    assert lines[9] == r"Method & Accuracy & Lead [95\,\%] & Last round \\"
    name = r"my\_method \textless{}A \& 50\,\% \{B\}\textgreater{}"
    assert lines[12] == name + r" & \textbf{61.00 $\pm$ 1.41} & +10.00 [+10.00, +10.00] & 41.00 $\pm$ 1.41 \\"
    assert lines[13:] == [r"\bottomrule", r"\end{tabular}", r"\end{table}"]

    text = render(TextTable(["A", "B"], [["y", "-1.5 [-2.0, 1.0] (3), cnn-2x32"]], [1]), "latex")
    assert r" & $-$1.5 [$-$2.0, 1.0] (3), cnn-2x32 \\" in text
    assert "caption" not in text


def test_what_begins_a_row_of_latex_is_no_argument_of_the_command_before_it():
    r"""`\\[2pt]`, `\\*` and `\midrule[2pt]` are commands with an argument, also where it is on the next line."""
    rows = [["[2pt]"], [r"\*a"], ["`[b]`"], ["-[c]"], [""], ["d"]]
    table = TextTable(["[x]"], rows, (), is_markdown=True, best=[CellIndex(1, 0)])
    lines = render(table, "latex").splitlines()
    begin = lines.index(r"\toprule")
    assert lines[begin + 1 : -2] == [
        r"{[}x] \\", r"\midrule", r"{[}2pt] \\", r"\textbf{{*}a} \\", r"{[}b] \\", r"-[c] \\", r" \\", r"d \\",
    ]  # fmt: skip


def test_rules_of_latex_stand_above_blocks_alone():
    rows = [["a", "1"], ["", "2"], ["b", "3"]]
    assert render(TextTable(["A", "B"], rows, [1]), "latex").count(r"\midrule") == 1  # an empty cell begins no block
    in_blocks = render(TextTable(["A", "B"], rows, [1], block_starts=[0, 2]), "latex")
    assert in_blocks.count(r"\midrule") == 2
    assert "\\midrule\nb & 3" in in_blocks

    settings_are_empty = latex([*records_of("one", 0.5), *records_of("one", 0.6, mu=0.1)], columns="Settings,Selected")
    assert settings_are_empty.count(r"\midrule") == 1


def test_every_latex_table_has_its_own_label(tmp_path):
    on_two = [*records_of("one", 0.5), *records_of("one", 0.5, dataset="a_b"), *records_of("one", 0.5, dataset="a-b")]

    def labels(text):
        return re.findall(r"\\label{(.*)}", text)

    by_itself = ["tab:paper-skew-digits", "tab:paper-skew-a-b", "tab:paper-skew-a-b-2"]
    assert labels(latex(on_two)) == by_itself
    assert labels(write_tables(on_two, format="latex", latex_label="tab:Mine")) == [
        "tab:Mine-paper-skew-digits", "tab:Mine-paper-skew-a-b", "tab:Mine-paper-skew-a-b-2",
    ]  # fmt: skip
    assert labels(write_tables(on_two[:1], format="latex", latex_label="tab:Mine")) == ["tab:Mine"]
    with raises_user_error("letters, digits and :.-_/+ (got '50 %')"):
        write_tables(on_two, format="latex", latex_label="50 %")
    with raises_user_error("a label is for LaTeX"):
        write_tables(on_two, format="markdown", latex_label="tab:mine")

    # A command's table is labelled by the name of its file, where that has letters.
    write_unsigned_record(tmp_path / "run", make_record())
    for name, label in (("Main Results.tex", "tab:main-results"), ("_.tex", "tab:paper-skew-digits")):
        output_of("table", tmp_path / "run", "--format", "latex", "--out", tmp_path / name)
        assert labels((tmp_path / name).read_text()) == [label]
    output_of("table", tmp_path / "run", "--format", "csv", "--out", tmp_path / "runs.csv")


def test_a_table_for_a_paper_has_the_papers_names():
    """Its caption says what the rows share."""
    records = [*records_of("fedproto-general", 0.5, 0.52, 0.51), *records_of("fedfm", 0.6, 0.62, 0.59)]
    text = latex(records)
    first, second = text.splitlines()[11:13]
    assert first.startswith("FedProto, generalized &")
    assert second.startswith("FedFM &")
    assert "on Digits, Dirichlet 0.5, after 4 rounds: mean $\\pm$ sample standard deviation over seeds 0 to 2." in text
    assert "Accuracy: of the round with the best validation accuracy." in text
    assert "Bold: the best accuracy, where the 95\\,\\% interval of its lead" in text
    assert "diverged" not in text

    # What rows do not share stands in columns, and no number of runs goes without saying.
    other = latex([*records, make_diverged_record(5, method="fedfm", rounds=9, selection="last")])
    assert "over runs (number of runs). Accuracy" in other
    assert "& 0, 1, 2 & 51.00 $\\pm$ 1.00 (3) &" in other
    assert "Diverged: a loss became infinite" in other

    # A headline that is not sure is not bold, and the caption does not speak of bold.
    unsure = latex([*records_of("fedavg", 0.5, 0.6), *records_of("fedfm", 0.55, 0.56)])
    assert "textbf" not in unsure
    assert "Bold" not in unsure
    assert "; seed 0." in latex([make_record()])


def test_columns_of_a_table_for_a_paper_are_headed_in_words():
    metrics = ["clients:worst", "clients:std", "rounds-to:90", "last-tenth", "class:3"]
    of_digits = make_record() | {"class_names": [str(digit) for digit in range(10)]}
    (row,) = [line for line in latex([of_digits], metrics).splitlines() if line.startswith("Method &")]
    headings = ["Worst client", "Deviation of clients", "Rounds to 90", "Last tenth", "Class 3"]
    assert row.removesuffix(r" \\").split(" & ")[-5:] == headings


def test_columns_are_chosen_and_ordered_by_the_names_that_the_table_shows():
    records = [*records_of("one", 0.5, 0.6), *records_of("two", 0.6, 0.65)]

    def chosen(columns, metrics=()):
        return list(tables.build_table(records, metrics, leads=True, layout=Layout(columns)).titles)

    assert chosen("method, LAST ROUND,Selected (best-validation), %") == ["Method", "Last round, %", SELECTED]
    assert chosen(["Lead", "Floats up / down"]) == [LEAD.title, FLOATS.title]
    assert chosen("Settings,Model,post") == ["Settings", "Model", "post, %"]  # also those with nothing to say
    assert chosen("at:1/2,Method", ["at:1/2"]) == ["at:1/2, %", "Method"]
    assert latex(records, columns="Method,Floats up / down").count("12,400 / 12,345") == 2
    assert "\none & one & not measured " in latex(records, columns="Method,Method,post")  # one may stand there twice

    with raises_user_error(
        "unknown column in --columns 'Last rund'; did you mean 'Last round'", "there are Method, Settings, Seeds,"
    ):
        chosen("Method,Last rund")
    with raises_user_error("got --format csv"):
        write_tables(records, (), "csv", Layout(columns="Method"))
    with raises_user_error("got --format csv"):
        write_tables(records, (), "csv", Layout(digits=0))
    with raises_user_error("unknown format 'latexx'; did you mean 'latex'"):
        write_tables(records, (), "latexx")


def test_chosen_columns_stand_by_what_they_hold():
    """A text column stands to the left and may be empty also behind a column of numbers."""
    records = [*records_of("one", 0.5, 0.6), *records_of("two", 0.6, 0.65)]
    chosen = "Selected,Method,Settings,Lead"
    assert "| ---: | --- | --- | ---: |" in write_tables(records, layout=Layout(chosen)).splitlines()
    lines = latex(records, columns=chosen).splitlines()
    assert r"\begin{tabular}{rllr}" in lines
    assert any(" & one &  & " in line for line in lines)

    lonely = latex(records_of("one", 0.5, 0.6), columns="Lead,Method,Settings").splitlines()
    assert r"-- & one &  \\" in lonely  # a lead over none is a number that lacks


def test_digits_are_of_percent_and_plain_numbers():
    records = records_of("one", 0.5, 0.52)
    columns = f"{SELECTED},rounds-to:1,floats-up"
    (row,) = tables.build_table(records, ["rounds-to:1", "floats-up"], layout=Layout(columns, 0)).rows
    assert row == ["51 ± 1 (2)", "1 ± 0 (2)", "12,400 ± 0 (2)"]
    assert "51.0 $\\pm$ 1.4 &" in latex(records, digits=1)
    for digits in (7, -1, 2.0, True):
        with raises_user_error(f"--digits must be from 0 to 6 (got {digits})"):
            latex(records, digits=digits)


def test_leads_between_kinds_of_models_are_remarked_on():
    of_global_model = records_of("fedavg", 0.5, 0.5)
    personal = [record | {"tested": "personal"} for record in records_of("two", 0.6, 0.6)]
    mixed = [*of_global_model, *personal]
    assert ACROSS_MODELS in write_tables(mixed)
    assert ACROSS_MODELS in latex(mixed)

    not_compared = [*records_of("fedavg", 0.5, 0.5, rounds=9), *personal]
    for records in (not_compared, personal, of_global_model):
        assert ACROSS_MODELS not in write_tables(records)
        assert ACROSS_MODELS not in latex(records)


def test_copies_of_a_run_count_once_and_other_runs_of_a_seed_each():
    record = make_record(selected=0.5)
    copy = make_record(selected=0.5)
    of_other_seed = make_record(seed=1, selected=0.6)
    with_other_parameters = make_record(selected=0.7)
    with_other_parameters["summary"]["params_sha256"] = "f" * 64
    (group,) = groups.group_runs([record, copy, of_other_seed, with_other_parameters])
    assert [record["summary"]["selected"] for record in group.records] == [0.5, 0.7, 0.6]


def test_several_runs_of_a_seed_are_told():
    record = make_record(selected=0.5)
    with_other_parameters = make_record(selected=0.7)
    with_other_parameters["summary"]["params_sha256"] = "f" * 64
    note = "one has 2 runs of seed 0, which came out differently: its mean counts each of them, its lead the last."
    assert f"- {note}\n" in markdown([record, with_other_parameters])
    assert f"% {note}\n" in latex([record, with_other_parameters])

    without_others = [record, make_record(), make_record(seed=1)]
    assert f"- {note}\n" not in markdown(without_others)
    assert f"% {note}\n" not in latex(without_others)


def test_labels_stand_for_the_methods_of_their_paths(tmp_path):
    write_unsigned_record(tmp_path / "a" / "seed-0", make_record(lr=0.1))
    write_unsigned_record(tmp_path / "b" / "seed-0", make_record(lr=0.2))
    write_unsigned_record(tmp_path / "b" / "seed-1", make_record(seed=1, lr=0.2))
    folders = [tmp_path / "a", tmp_path / "b"]

    def sizes(*labels):
        records = run_records.find_records(folders, labels)
        return {group.title: len(group.records) for group in groups.group_runs(records)}

    assert sizes("plain", "faster") == {"plain": 1, "faster": 2}
    with raises_user_error("--label stands once for each path, in order (got 1 for 2"):
        sizes("plain")
    write_unsigned_record(tmp_path / "b" / "other", make_record(lr=0.4))
    assert sizes("p", "q") == {"p": 1, "q, lr 0.4": 1, "q, lr 0.2": 2}


# Runs of several protocols and data sets

MIXED = [make_record("one"), make_record("one", dataset="letters", lr=0.2), make_record("two", dataset="letters"),
         make_record("two", protocol="paper:other")]  # fmt: skip


def test_methods_and_data_sets_are_selected_in_any_case():
    assert groups.select_records(MIXED, ["ONE"]) == MIXED[:2]
    assert groups.select_records(MIXED, ["one", "two"], ["Letters"]) == MIXED[1:3]
    assert groups.select_records(MIXED) == MIXED
    with raises_user_error("unknown method among the runs 'on'; did you mean 'one'", "there are one, two"):
        groups.select_records(MIXED, ["on"])
    with raises_user_error("unknown data set among the runs 'digits'"):
        groups.select_records(MIXED[1:3], [], ["digits"])


def test_commands_select_and_label(tmp_path, folder):
    for number, record in enumerate(MIXED):
        write_unsigned_record(tmp_path / str(number), record)

    assert "### paper:other, digits" in output_of("table", "--dataset", "digits", tmp_path)
    lines = output_of("table", "--format", "csv", "--method", "one", tmp_path).splitlines()
    assert len(lines) == 3  # one file for all

    file = tmp_path / "y.svg"
    assert output_of("plot", "--dataset", "letters", "--label", "ours", "--out", file, tmp_path) == f"{file}\n"
    assert "<!-- ours" in file.read_text()
    out_error = error_of("plot", "--out", tmp_path / "y.jpgg", tmp_path)
    assert "--out must end in .png, .pdf, .svg or .pgf" in out_error
    data_error = error_of("plot", "--kind", "tsne", "--method", "one", tmp_path)
    assert "of one data set (got digits, letters); use --dataset" in data_error


def test_a_single_table_has_no_title():
    (table,) = tables.build_tables(MIXED[:1])
    assert table.title == ""


def test_mixed_runs_have_a_panel_for_each_board():
    """A method keeps its look in all of them."""
    records = [*MIXED, make_record("one", seed=1), make_diverged_record(2, method="two", dataset="letters")]
    figure = line_charts.learning_curves(records)
    of_skew, of_letters, of_other = figure.axes
    assert of_skew.get_title() == "Digits, Dirichlet 0.5 (paper:skew)"
    assert of_letters.get_title() == "Letters, Dirichlet 0.5 (paper:skew)"
    assert of_other.get_title() == "Digits, Dirichlet 0.5 (paper:other)"

    colours = {}
    for axes in figure.axes:
        for line in axes.get_legend().get_lines():
            method = re.split(r" \(|,", line.get_label())[0]
            colours.setdefault(method, set()).add(line.get_color())
    assert all(len(of_method) == 1 for of_method in colours.values())

    def crosses(axes):
        return [line for line in axes.lines if line.get_gid() == "diverged"]

    assert [len(crosses(axes)) for axes in figure.axes] == [0, 1, 0]

    left_out = line_charts.learning_curves([*records, make_record("three") | {"cost": None}], "floats")
    assert left_out.get_suptitle() == "left out, without values: 1"  # above all panels


def test_a_method_that_is_gone_is_tested_by_its_global_model():
    """As others are: the column of the tested model is for runs that differ in it."""
    records = [make_record("fedavg", 0), make_record("a-method-that-is-gone", 0)]
    assert "Model" not in tables.build_table(records).titles


def test_the_last_round_has_no_second_column_where_it_is_the_selected_one():
    def columns(*selections):
        records = []
        for seed, selection in enumerate(selections):
            record = make_record("fedavg", seed)
            record["summary"]["selection"] = selection
            records.append(record)
        return tables.build_table(records).titles

    assert "Last round, %" not in columns("last", "last")
    assert "Last round, %" in columns("last", "best-test")


def test_a_lead_is_over_the_best_other_paired_by_seed():
    records = [*records_of("one", 0.5, 0.6), *records_of("two", 0.4, 0.55), *records_of("three", 0.1, 0.2)]
    with_leads = tables.build_table(records, leads=True)
    rows = [dict(zip(with_leads.titles, line, strict=True)) for line in with_leads.rows]
    lead_of = {row["Method"]: row[LEAD.title] for row in rows}
    half_width = 12.7062 * 3.53553 / 2**0.5  # Student's t with one degree of freedom; the differences are 10 and 5
    assert lead_of["one"] == f"+7.50 [{7.5 - half_width:+.2f}, {7.5 + half_width:+.2f}] (2)"
    assert lead_of["two"].startswith("-7.50 [")
    assert lead_of["three"].startswith("-40.00 [")  # behind the first, not the second
    assert LEADS in with_leads.notes

    without_leads = tables.build_table(records)
    assert LEAD.title not in without_leads.titles
    assert LEADS not in without_leads.notes
    assert LEAD.title not in tables.build_table(records_of("one", 0.5, 0.6), leads=True).titles


def test_commands_are_those_of_the_runs_without_their_folders_and_each_once():
    typed = [
        "fedcli run feddyn --seed 0",
        "fedcli run feddyn --out=/a --seed 0",
        "fedcli run feddyn --out '/b c' --seed 0",
        "python run.py",
    ]
    assert tables.list_commands({"command": command} for command in typed) == ["fedcli run feddyn --seed 0"]
