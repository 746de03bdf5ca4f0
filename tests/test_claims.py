"""Claims: intervals and verdicts by hand, which runs count for one, and that every claim's cells are there."""

import csv
import io
import math
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pandas as pd
import pytest

import fedcli
from fedcli import Claim, Control, registry
from fedcli.results import claim_tables, claims, durations, pairs, plans, run_records, verdicts
from fedcli.results.intervals import Interval, mean_interval
from fedcli.results.render import render
from fedcli.runs.record import read_record, write_record
from tests.commands import output_of
from tests.scripts import load_script
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)

deciding_runs = load_script(Path(__file__).parent.parent / "results" / "deciding_runs.py")
RUN = {
    "protocol": "fedfa:digits", "dataset": "digits", "train_examples": 120, "num_clients": 3, "cohort_size": 3,
    "partition": "iid", "rounds": 20, "local_epochs": 1, "device": "cpu",
}  # fmt: skip
# Rows of the paper's Table 2, by quick methods in the place of their own.
ROWS = {"FedFA": ("fedavg", {}), "FedAvg": ("fedprox", {}), "FedDyn": ("fedprox", {"lr": 0.3})}
FILE = f"""
ON = {RUN}
ROWS = {ROWS}
"""
FILE += """
from fedcli import Cell, Claim, Table, grid

PAIR = {row: ROWS[row] for row in ("FedFA", "FedAvg")}
TABLES = (
    Table("own:2", "title", ("FedFA", "Table 2"), grid(PAIR, {"FMNIST #C=2": ON})
        + grid(PAIR, {"FMNIST alpha=0.1": {**ON, "lr": 0.3}}), seeds=(0, 1)),
    Table("own:8", "title", ("FedFA", "Table 8"), grid(PAIR, {"FMNIST #C=2": ON}, "rounds-to:50")),
    Table("own:several", "title", ("FedFA", "Table 2"), grid(ROWS, {"FMNIST #C=2": ON})),
    Table("own:declines", "title", ("FedFA", "Table 2"), grid(PAIR, {"FMNIST #C=2": ON})
        + grid({f"{name} w/o skew": row for name, row in PAIR.items()},
               {"FMNIST (no skew)": {**ON, "lr": 0.3}})),
    Table("own:skews", "title", ("FedFA", "Table 2"), grid(PAIR, {"FMNIST #C=2": ON})
        + grid(PAIR, {"FMNIST alpha=0.1": {**ON, "partition": "dirichlet:0.1"}})),
    Table("own:mixed", "title", ("FedFA", "in-text"), grid(PAIR, {"FMNIST #C=2": ON})
        + grid(PAIR, {"sent": ON}, "floats-up")),
    Table("own:floats", "title", ("FedFA", "in-text"), grid(PAIR, {"sent": ON}, "floats-up")),
    Table("own:nmi", "title", ("FedFA", "in-text"), grid(PAIR, {"sent": ON}, "quality:nmi")),
)
CLAIMS = (
    Claim("own:ahead", "one is ahead", "own:2", "FedFA", ("FedAvg",), ("FMNIST #C=2",)),
    Claim("own:sooner", "one needs fewer rounds", "own:8", "FedFA", ("FedAvg",), ("FMNIST #C=2",), "lower"),
    Claim("own:both", "one is ahead in both", "own:2", "FedFA", ("FedAvg",), ("FMNIST #C=2", "FMNIST alpha=0.1")),
    Claim("own:less", "one sends less", "own:floats", "FedFA", ("FedAvg",), ("sent",), "lower"),
)
"""


class Study(NamedTuple):
    """A file of claims, and a folder of runs with accuracies in percent."""

    file: Path
    runs: Path
    template: dict[str, dict]  # a record of each method

    def add(self, row, seed, percent=None, name="", curve=None, status="finished", fingerprint=None, **changes):
        """A run of a row that has this accuracy in all its rounds, or that of `curve` in each."""
        method, options = ROWS[row]
        config = options | changes
        record = self.template[method]
        rounds = config.get("rounds", RUN["rounds"])
        (round_of_record,) = record["rounds"]
        entries = []
        accuracies = curve or [percent] * rounds
        for number, value in enumerate(accuracies):
            entries.append({**round_of_record, "round": number, "test_accuracy": value / 100})
        last = entries[-1]["test_accuracy"]
        edited = {
            **record, "seed": seed, "status": status, "load": [], "rounds": entries,
            "config": {**record["config"], "rounds": rounds, "seed": seed, **config},
            "summary": {**record["summary"], "selected": last, "last": last},
        }  # fmt: skip
        if fingerprint is not None:
            edited["partition"] = {**record["partition"], "fingerprint": fingerprint}
        if status == "failed":
            edited["error"] = "NonFiniteLoss in round 2"

        folder = self.runs / f"{row}-{seed}{name}"
        folder.mkdir(parents=True)
        write_record(folder, edited)

    def add_pairs(self, fedfa, fedavg, first=0, **changes):
        """Runs of both rows with these accuracies, by seeds from the `first` on."""
        for seed, (of_fedfa, of_fedavg) in enumerate(zip(fedfa, fedavg, strict=True), first):
            self.add("FedFA", seed, of_fedfa, **changes)
            self.add("FedAvg", seed, of_fedavg, **changes)

    def answer(self, name="ahead", at_hand=lambda name: True, **changes):
        """The answer to a claim of the file with some of its fields changed."""
        (claim,) = [claim for claim in registry.claims(str(self.file)) if claim.name == f"own:{name}"]
        (answer,) = claims.answer_claims([replace(claim, **changes)], [self.runs], at_hand)
        return answer


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A record of each method, to be edited."""
    folder = tmp_path_factory.mktemp("template")
    one_round = {**RUN, "rounds": 1, "seed": 0}
    return {name: fedcli.run(name, out=folder / name, **one_round).record for name in ("fedavg", "fedprox")}


@pytest.fixture
def study(tmp_path, template):
    study = Study(tmp_path / "own.py", tmp_path / "runs", template)
    study.file.write_text(FILE)
    study.runs.mkdir()
    return study


def test_an_interval_is_students_t_around_the_mean():
    measured = mean_interval([1.0, 2.0, 3.0])  # deviation 1, t of two degrees of freedom 4.3027
    assert measured == pytest.approx(Interval(2.0, 2.0 - 4.302653 / 3**0.5, 2.0 + 4.302653 / 3**0.5, 3), rel=1e-6)
    assert mean_interval([]).num_values == 0
    assert mean_interval([5.0]) == pytest.approx(Interval(5.0, math.nan, math.nan, 1), nan_ok=True)


UP = Interval(2.0, 1.0, 3.0, 3)
DOWN = Interval(-2.0, -3.0, -1.0, 3)
Lost = claims.SeedsWithoutValue
NONE_LOST = Lost(0, 0)  # runs of the better one, and of the other
REPRODUCED = ("reproduced", "")
CONTRADICTED = ("contradicted", "")
LOST = ("undecided", "runs of the better one are lost")


@pytest.mark.parametrize(
    ("measured", "direction", "better", "lost", "verdict"),
    [
        (UP, "higher", "higher", NONE_LOST, REPRODUCED),
        (UP, "lower", "lower", NONE_LOST, CONTRADICTED),
        (DOWN, "lower", "lower", NONE_LOST, REPRODUCED),
        (Interval(2.0, 0.0, 4.0, 3), "higher", "higher", NONE_LOST, ("undecided", "zero inside, n = 3")),
        (Interval(2.0, 1.9, 2.1, 2), "higher", "higher", NONE_LOST, ("undecided", "n = 2")),
        (mean_interval([]), "higher", "higher", Lost(1, 0), ("undecided", "no pair has a value")),
        (UP, "higher", "higher", Lost(0, 2), REPRODUCED),  # the other one failed: the claim holds all the more
        (UP, "higher", "higher", Lost(2, 0), LOST),
        (DOWN, "higher", "higher", Lost(0, 1), LOST),
        (DOWN, "higher", "higher", Lost(1, 0), CONTRADICTED),
        # A claim may be that a row has the worse values, of which the other row is the better one.
        (DOWN, "lower", "higher", Lost(1, 0), REPRODUCED),
        (DOWN, "lower", "higher", Lost(0, 1), LOST),
        (UP, "lower", "higher", Lost(1, 0), LOST),
        (UP, "lower", "higher", Lost(0, 1), CONTRADICTED),
        (DOWN, "lower", "lower", Lost(1, 0), LOST),  # fewer rounds are better
        # Where neither is better, as of a drift, the claim's side counts.
        (DOWN, "lower", "", Lost(1, 0), LOST),
        (DOWN, "lower", "", Lost(0, 1), REPRODUCED),
    ],
)
def test_a_verdict_needs_three_pairs_that_exclude_zero_and_no_lost_run_of_the_better_one(
    measured, direction, better, lost, verdict
):
    assert claims.judge(measured, direction, better, lost, exact=False) == verdict


@pytest.mark.parametrize(("value", "verdict"), [(-5.0, REPRODUCED), (0.0, ("undecided", "zero inside, n = 1"))])
def test_what_no_seed_changes_is_judged_by_one_pair(value, verdict):
    assert claims.judge(mean_interval([value]), "lower", "", NONE_LOST, exact=True) == verdict


def test_three_pairs_in_full_give_a_verdict_and_the_last_tenth_stands_beside(study):
    study.add_pairs(fedfa=[81, 82], fedavg=[80, 80])
    study.add("FedFA", 2, curve=[50] * 18 + [70, 83])
    study.add("FedAvg", 2, curve=[50] * 18 + [60, 80])
    study.add("FedFA", 9, 10)  # a seed without its pair counts for nothing
    ahead = study.answer()
    half = 4.302653 / 3**0.5  # deviation 1, Student's t of two degrees of freedom 4.3027
    assert ahead.comparison.lead.interval == pytest.approx(Interval(2.0, 2 - half, 2 + half, 3), rel=1e-6)
    assert ahead.comparison.verdict.outcome == "undecided"
    assert ahead.comparison.verdict.reason == "zero inside, n = 3"
    assert ahead.size == "in full, by the text"
    assert ahead.comparison.last_tenth_lead.interval == pytest.approx(mean_interval([1, 2, 6.5]))
    assert ahead.comparison.evidence.seeds == (0, 1, 2)
    assert ahead.context.paper_difference == pytest.approx(84.08 - 74.60)


def test_a_run_whose_code_was_changed_between_its_rounds_counts_for_no_claim(study):
    study.add_pairs(fedfa=[82, 82.1, 82.2], fedavg=[80, 80, 80])
    assert study.answer().comparison.verdict.outcome == "reproduced"
    record = read_record(study.runs / "FedFA-1")
    write_record(study.runs / "FedFA-1", {**record, "changed": [{"round": 3, "what": "its method"}]})
    after = study.answer()
    assert after.comparison.verdict.outcome == "undecided"
    assert after.comparison.verdict.reason == "n = 2"
    assert after.comparison.evidence.seeds == (0, 2)


def test_runs_in_full_and_three_seeds_count_first(study):
    """Runs in full go before reduced ones, and runs of three seeds before those of a nearer size."""
    study.add_pairs(fedfa=[60, 60], fedavg=[70, 71], name="-15", rounds=15, train_examples=60)
    study.add_pairs(fedfa=[60, 60, 60], fedavg=[70, 71, 72], name="-5", rounds=5, train_examples=60)
    reduced = study.answer()
    assert reduced.comparison.verdict.outcome == "contradicted"
    assert reduced.size == "reduced to rounds 5 of 20, training images 60 of 120"

    study.add_pairs(fedfa=[60, 60, 60], fedavg=[70, 71, 72], name="-nearer", rounds=5)
    assert study.answer().size == "reduced to rounds 5 of 20"

    study.add_pairs(fedfa=[85, 85.1], fedavg=[80, 80])
    assert study.answer().comparison.verdict.reason == "n = 2"
    assert study.answer().size == "in full, by the text"

    study.add_pairs(fedfa=[84.9], fedavg=[80], first=2)
    assert study.answer().comparison.verdict.outcome == "reproduced"
    assert study.answer().size == "in full, by the text"


def test_runs_in_full_without_the_number_do_not_hide_reduced_ones_that_have_it(study):
    study.add_pairs(fedfa=[1, 1, 1], fedavg=[2, 2, 2], rounds=10)
    for file in study.runs.rglob("record.json"):
        record = read_record(file)
        write_record(file.parent, {**record, "quality": {"nmi": record["summary"]["selected"]}})
    study.add_pairs(fedfa=[1, 1, 1], fedavg=[2, 2, 2], name="-unmeasured")
    less = study.answer("less", table=f"{study.file}:own:nmi")
    assert less.comparison.verdict.outcome == "reproduced"
    assert less.size == "reduced to rounds 10 of 20"


@pytest.mark.parametrize(
    "other",
    [{"lr": 0.5}, {"rounds": 10}, {"fingerprint": "another"}, {"train_examples": 200}, {"status": "interrupted"}],
    ids=lambda other: next(iter(other)),
)
def test_runs_that_differ_or_have_not_ended_are_no_pair(study, other):
    for seed in range(3):
        study.add("FedFA", seed, 81)
        study.add("FedAvg", seed, 80, **other)
    assert study.answer().comparison.verdict.outcome == "not run"
    assert study.answer(at_hand=lambda name: name != "digits").comparison.verdict.outcome == "data not at hand"


def test_cells_with_other_partitions_are_a_pair_of_runs_with_other_partitions(study):
    for seed in range(3):
        study.add("FedFA", seed, 81 + seed / 10)
        study.add("FedFA", seed, 79, name="-skewed", partition="dirichlet:0.1", fingerprint="another")
    across = {"other_rows": ("FedFA",), "other_columns": ("FMNIST alpha=0.1",), "direction": "lower"}
    answer = study.answer(table=f"{study.file}:own:skews", **across)
    assert answer.comparison.verdict.outcome == "contradicted"
    assert answer.comparison.lead.interval.mean == pytest.approx(2.1)


@pytest.mark.parametrize("columns", [{"columns": ("FMNIST #C=2", "sent")}, {"other_columns": ("sent",)}])
def test_numbers_of_two_kinds_are_not_added_up(study, columns):
    with raises_user_error("numbers of two kinds (got selected and floats-up)"):
        study.answer(table=f"{study.file}:own:mixed", **columns)


def test_numbers_of_models_of_different_rounds_are_no_pair(study):
    """One row's model is that of the last round, the other's the selected one, of an earlier round."""
    study.add_pairs(fedfa=[1, 1, 1], fedavg=[2, 2, 2])
    for file in study.runs.rglob("record.json"):
        record = read_record(file)
        measured = 19 if file.parent.name.startswith("FedFA") else 3
        summary = {**record["summary"], "selected_round": 3}
        quality = {"nmi": record["summary"]["selected"], "round": measured}
        write_record(file.parent, {**record, "summary": summary, "quality": quality})
    assert study.answer("less", table=f"{study.file}:own:nmi").comparison.verdict.outcome == "not run"


def test_a_run_that_diverged_cannot_be_left_out_for_the_one_that_is_ahead(study):
    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[80, 80, 80])
    study.add("FedFA", 3, 10, status="failed")
    study.add("FedAvg", 3, 80)
    ahead = study.answer()
    assert ahead.comparison.verdict.outcome == "undecided"
    assert ahead.comparison.lead.interval.num_values == 3
    assert ahead.comparison.verdict.reason == "runs of the better one are lost; FedFA: 1 of 4 without a value"
    assert ahead.needed_seeds is None  # those of the three seeds are there
    assert ahead.command == ""
    text = deciding_runs.describe_deciding_runs(ahead, study.runs, durations.tabulate_times([]))
    assert text == "no further seeds, since runs of the better row are lost"


def test_a_target_that_is_never_reached_is_like_a_run_that_diverged(study):
    for seed in range(3):
        study.add("FedFA", seed, curve=[40] * (3 + seed) + [60] * 10)
        study.add("FedAvg", seed, curve=[40] * (9 + 2 * seed) + [60] * 10)
    study.add_pairs(fedfa=[60], fedavg=[40], first=3)
    sooner = study.answer("sooner")
    assert sooner.context.paper_difference == 10 - 25
    assert sooner.comparison.lead.interval.mean == pytest.approx(-7)
    assert sooner.comparison.verdict.outcome == "reproduced"
    assert sooner.comparison.verdict.reason == "FedAvg: 1 of 4 without a value"


def test_rarer_tests_are_a_reduction_where_the_round_matters(study):
    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[80, 80, 80], eval_every=2)
    assert study.answer().size == "in full, by the text"  # the last round is tested anyway
    assert study.answer("sooner").comparison.evidence.reduction == "eval every 2 for 1"


def test_several_columns_count_by_their_mean_or_less_others(study):
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80])
    assert study.answer("both").comparison.verdict.outcome == "not run"

    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[79, 79, 79], name="-lr", lr=0.3)
    both = study.answer("both")
    assert both.comparison.lead.interval.mean == pytest.approx((4.1 + 2.1) / 2)
    assert both.context.paper_difference == pytest.approx(((84.08 - 74.60) + (83.42 - 69.81)) / 2)

    more = study.answer(subtracted_columns=("FMNIST alpha=0.1",))
    assert more.comparison.verdict.outcome == "reproduced"
    assert more.comparison.lead.interval.mean == pytest.approx(2)
    assert more.context.paper_difference == pytest.approx((84.08 - 74.60) - (83.42 - 69.81))


def test_a_claim_on_several_rows_counts_by_its_smallest_lead_once_all_rows_have_been_run(study):
    def answer(row="FedFA", other_rows=("FedAvg", "FedDyn"), **changes):
        return study.answer(table=f"{study.file}:own:several", row=row, other_rows=other_rows, **changes)

    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80])
    assert answer().comparison.verdict.outcome == "undecided"
    assert answer().comparison.verdict.reason == "1 of 2 others run"
    assert answer().command.endswith(" --seeds 0,1,2")  # no more seeds than the rows that are there have
    assert answer().context.paper_difference == pytest.approx(
        84.08 - 74.77
    )  # on FedDyn, the better of the two in the paper

    study.add("FedDyn", 0, 82)
    study.add("FedDyn", 1, 82.1)
    study.add("FedDyn", 2, 82.2)
    assert answer().comparison.verdict.outcome == "reproduced"
    assert answer().comparison.lead.interval.mean == pytest.approx(2)
    both_leads = "+2.00 [+2.00, +2.00] (3) over FedDyn; +4.10 [+3.85, +4.35] (3) over FedAvg"
    assert answer().comparison.lead.format(answer().context.metric) == both_leads
    assert len(answer().comparison.evidence.folders) == 9

    behind = answer("FedAvg", ("FedFA", "FedDyn"))
    assert behind.comparison.verdict.outcome == "contradicted"
    assert behind.comparison.lead.rows_text.partition(";")[0] == "over FedFA"
    assert answer("FedDyn", ("FedAvg", "FedFA")).comparison.verdict.outcome == "contradicted"  # by one of two is enough
    assert answer(direction="lower").comparison.lead.rows_text.startswith(
        "over FedAvg; +2.00 "
    )  # where the lead should be below zero


def test_all_rows_of_a_claim_are_compared_in_the_form_of_which_most_have_been_run(study):
    """FedAvg has been run in full too, where its lead is smaller, but FedDyn has not."""
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80])
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80], name="-short", rounds=10)
    for seed in range(3):
        study.add("FedDyn", seed, 82, rounds=10)
    answer = study.answer(table=f"{study.file}:own:several", other_rows=("FedAvg", "FedDyn"))
    assert answer.comparison.verdict.outcome == "reproduced"
    assert answer.comparison.evidence.reduction == "rounds 10 of 20"
    assert answer.comparison.lead.rows_text.startswith("over FedDyn; ")

    assert len(answer.comparison.evidence.pairs) == 6

    for pair in answer.comparison.evidence.pairs:
        assert len(read_record(pair.run.folder)["rounds"]) == 10
        assert len(read_record(pair.other_run.folder)["rounds"]) == 10


def test_of_equally_complete_forms_the_nearest_counts(study):
    """Of forms with as many rows, the one whose least near comparison is nearest counts.

    In ten rounds FedAvg has three seeds and FedDyn one, in five rounds both have two.
    """
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80], name="-ten", rounds=10)
    study.add("FedDyn", 0, 82, name="-ten", rounds=10)
    study.add_pairs(fedfa=[84, 84.1], fedavg=[80, 80], name="-five", rounds=5)
    for seed in range(2):
        study.add("FedDyn", seed, 82, name="-five", rounds=5)
    answer = study.answer(table=f"{study.file}:own:several", other_rows=("FedAvg", "FedDyn"))
    assert answer.comparison.verdict.reason == "n = 2"
    assert answer.comparison.evidence.reduction == "rounds 5 of 20"


def test_the_smallest_lead_over_the_last_rounds_may_be_on_another_row(study):
    for seed in range(3):
        study.add("FedFA", seed, curve=[50] * 18 + [90, 84])
        study.add("FedAvg", seed, curve=[50] * 18 + [88, 80])
        study.add("FedDyn", seed, curve=[50] * 18 + [80, 82])
    answer = study.answer(table=f"{study.file}:own:several", other_rows=("FedAvg", "FedDyn"))
    assert answer.comparison.lead.rows_text.startswith("over FedDyn; ")
    assert answer.comparison.last_tenth_lead.format(answer.context.metric).startswith("+3.00 ")
    assert answer.comparison.last_tenth_lead.rows_text == "over FedAvg"


def test_rows_may_have_another_name_or_another_column_elsewhere(study):
    """The first row is 4 ahead in the first column and 1 in the second, so that it loses 3 more between them."""
    table = f"{study.file}:own:declines"
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80.1, 80.2])
    study.add_pairs(fedfa=[91, 91.1, 91.2], fedavg=[90, 90.1, 90.2], name="-even", lr=0.3)
    less = {
        "subtracted_columns": ("FMNIST (no skew)",),
        "row_aliases": {"FedFA": "FedFA w/o skew", "FedAvg": "FedAvg w/o skew"},
    }
    answer = study.answer(table=table, **less)
    assert answer.comparison.verdict.outcome == "reproduced"
    assert answer.comparison.lead.interval.mean == pytest.approx(3)
    assert answer.context.paper_difference == pytest.approx((84.08 - 74.60) - (89.67 - 85.90))

    across = study.answer(table=table, row="FedAvg w/o skew", other_rows=("FedFA",), columns=("FMNIST (no skew)",),
                          other_columns=("FMNIST #C=2",))  # fmt: skip
    assert across.comparison.verdict.outcome == "reproduced"
    assert across.comparison.lead.interval.mean == pytest.approx(6)
    assert across.context.paper_difference == pytest.approx(85.90 - 84.08)


def test_a_lead_by_construction_or_by_a_control_is_no_reproduction(study):
    """What holds by construction is not reproduced, and a control explains a lead."""
    study.add_pairs(fedfa=[84, 84.1, 84.2], fedavg=[80, 80, 80])
    built = study.answer(construction="the sum of both is fixed")
    assert built.comparison.verdict.outcome == "by construction"
    assert built.comparison.verdict.reason == "the sum of both is fixed"
    assert built.command == ""
    assert study.answer("both", construction="so it is").comparison.verdict.outcome == "not run"

    study.add("FedDyn", 0, 83)
    study.add("FedDyn", 1, 85)
    study.add("FedDyn", 2, 84.1)
    answer = study.answer(
        table=f"{study.file}:own:several", other_rows=("FedAvg", "FedDyn"), control=Control("FedDyn", "a higher rate")
    )
    assert answer.comparison.verdict.outcome == "undecided"
    assert answer.comparison.verdict.reason == "a higher rate explains the lead as far as told; zero inside, n = 3"


def test_what_would_decide_a_claim_is_the_runs_that_lack_and_their_hours(study):
    def decided():
        timed = durations.tabulate_times(run_records.read_runs([study.runs]))
        text, _, _ = deciding_runs.describe_deciding_runs(study.answer(), study.runs, timed).partition(", timed")
        return text

    study.add_pairs(fedfa=[81], fedavg=[80])
    assert decided() == "4 runs in full; time: about 1 core-minutes"  # two of three seeds lack
    assert study.answer().command.endswith(" --seeds 0,1,2")

    study.add_pairs(fedfa=[82, 83], fedavg=[80, 80], first=1)
    assert decided() == "2 runs in full, to have 4 seeds; time: about 1 core-minutes"
    assert study.answer().command.endswith(" --seeds 0,1,2,3")

    study.add_pairs(fedfa=[82] * 4, fedavg=[80] * 4, first=3)
    assert study.answer().comparison.verdict.outcome == "reproduced"
    assert decided() == ""
    assert study.answer().command == ""


def test_new_seeds_are_others_than_those_of_the_table(study, monkeypatch):
    study.add_pairs(fedfa=[81, 82, 83], fedavg=[80, 80, 80])
    answer = study.answer()
    monkeypatch.setattr(verdicts, "find_table", lambda name: SimpleNamespace(seeds=(2, 0)))
    assert answer.needed_seeds == (2, 0, 3, 4)


def test_no_command_is_said_to_decide_what_thirty_seeds_would_not(study):
    study.add_pairs(fedfa=[81, 79, 80.1], fedavg=[80, 80, 80])
    answer = study.answer()
    assert answer.comparison.verdict.outcome == "undecided"
    assert answer.needed_seeds is None
    assert answer.command == ""
    assert "decided by" not in render(claim_tables.build_claims_table([answer]))
    text = deciding_runs.describe_deciding_runs(answer, study.runs, durations.tabulate_times([]))
    assert text == "more than 30 seeds, if their spread stays"


@pytest.mark.parametrize("name", ["w3", "resnet18"])
def test_a_run_takes_the_time_of_the_benched_workload_of_its_network_and_images(name, tmp_path):
    (tmp_path / "a-gpu-torch2.csv").write_text(
        "workload,device,method,hardware,precision,samples_per_second,seconds_per_round,evaluation_seconds\n"
        f"{name},cuda,fedavg,a GPU,float32,1000,40,10\n"
        f"{name},cuda,fedgen,a GPU,float32,9,9,9\n"
        f"{name},cpu,fedavg,a CPU,float32,1000,40,10\n"
        "w1,cuda,fedavg,a GPU,float32,9,9,9\n"
    )
    table = registry.find_table("fedfm:III")
    planned = plans.plan_table(table, tmp_path, only=["FedAvg", "CIFAR-10 NIID-1"], seeds=[0])

    timed = deciding_runs.tabulate_benchmarks(tmp_path)
    (expected,) = durations.estimate_times(planned.runs, timed, "cuda", "")

    seconds_of_an_example = 50 / 40_000
    images, epochs, rounds = 50_000, 10, 100
    assert expected.seconds == pytest.approx(seconds_of_an_example * images * epochs * rounds)
    assert set(timed.machine) == {"a GPU"}
    assert expected.machines == {"a GPU"}


def test_a_method_without_timings_has_its_ratio_to_fedavg_elsewhere(tmp_path):
    """MOON takes two seconds for one of FedAvg's on another network, in rounds of as many examples."""

    def timing(method, network, **measured):
        return {"undisturbed": True, "machine": "a CPU", "method": method, **network, **measured}

    small = {"device": "cpu", "backbone": "cnn-2x32", "shape": "[1, 28, 28]", "precision": "float32"}
    large = {"device": "cpu", "backbone": "resnet18", "shape": "[3, 32, 32]", "precision": "float32"}
    timed = pd.DataFrame([
        timing("fedavg", small, seconds_per_example=1.0, examples=9, threads=1),
        timing("moon", small, seconds_per_example=2.0, examples=9, threads=1),
        timing("moon", small, seconds_per_example=50.0, examples=8, threads=1),
        timing("fedavg", large, seconds_per_example=0.5, examples=9, threads=2),
    ])  # fmt: skip
    assert durations.compute_time_ratios(timed).to_dict() == {"fedavg": 1.0, "moon": 2.0}

    only = ["FedAvg", "MOON", "CIFAR-10 NIID-1"]
    planned = plans.plan_table(registry.find_table("fedfm:III"), tmp_path, only=only, seeds=[0])
    times = durations.estimate_times(planned.runs, timed, "cpu", "")
    examples = 50_000 * 10 * 100
    assert [time.seconds for time in times] == [0.5 * examples, 2 * 0.5 * examples]
    assert [time.core_seconds for time in times] == [examples, 2 * examples]


@pytest.mark.parametrize(("rounds", "verdict"), [(2, "reproduced"), (1, "not run")])
def test_runs_of_less_than_a_tenth_of_the_rounds_say_only_what_is_sent(study, rounds, verdict):
    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[80, 80, 80], rounds=rounds)  # of 20
    assert study.answer().comparison.verdict.outcome == verdict
    less = study.answer("less")
    assert less.comparison.verdict.outcome == "undecided"
    assert less.comparison.lead.interval.mean == 0.0
    assert less.context.paper_difference is None


def test_what_a_claim_allows_in_place_of_the_cells_is_said(study):
    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[80, 80, 80], rounds=5, lr=0.5, batch_size=8)
    answer = study.answer(allowed_options={"lr": 0.5, "batch_size": None})
    assert answer.comparison.verdict.outcome == "reproduced"
    assert answer.comparison.evidence.reduction == "rounds 5 of 20, batch size 8 for 16, lr 0.5 for 0.2"
    assert study.answer(allowed_options={"lr": 0.4, "batch_size": None}).comparison.verdict.outcome == "not run"
    study.add_pairs(fedfa=[81, 81.1, 81.2], fedavg=[80, 80, 80], name="-full")
    other = study.answer(table=f"{study.file}:own:several", other_rows=("FedDyn",), allowed_options={"lr": None})
    assert other.comparison.evidence.reduction == "lr 0.2 for 0.3"  # of the other row's runs alone


@pytest.mark.slow
def test_the_command_prints_the_claims_of_a_file_by_verdict(study):
    study.add_pairs(fedfa=[85, 85.1, 85.2], fedavg=[80, 80, 80])
    behind = 'Claim("own:behind", "one is behind", "own:2", "FedFA", ("FedAvg",), ("FMNIST #C=2",), "lower"),\n    '
    study.file.write_text(FILE.replace('Claim("own:ahead"', f'{behind}Claim("own:ahead"'))
    command = ["claims", str(study.file), "--runs", str(study.runs), "--format"]

    output = output_of(*command, "csv")
    rows = {row["claim"]: row for row in csv.DictReader(io.StringIO(output))}
    first, second, *_, last = rows
    assert first == "own:ahead"
    assert rows[first]["verdict"] == "reproduced"
    assert second == "own:behind"
    assert rows[second]["verdict"] == "contradicted"
    assert last == "own:both"
    assert rows[last]["verdict"] == "not run"

    folders = ["FedFA-0", "FedAvg-0", "FedFA-1", "FedAvg-1", "FedFA-2", "FedAvg-2"]
    assert rows["own:ahead"]["runs"].split("; ") == [str(study.runs / folder) for folder in folders]
    assert float(rows["own:ahead"]["low"]) == pytest.approx(5.1 - 0.2484138, rel=1e-5)

    output = output_of(*command, "markdown")
    ours = "+5.10 [+4.85, +5.35] (3)"
    row = f"| `own:ahead` one is ahead | reproduced | +9.48 | {ours} | {ours} | in full, by the text |"
    assert row in output


@pytest.mark.slow
def test_the_command_of_a_claim_runs_its_rows_and_nothing_else(monkeypatch):
    monkeypatch.setattr(
        plans, "find_shipped_folders", list
    )  # plans of all claims compare them with every committed record
    answers = claims.answer_claims(registry.claims(), [], lambda name: True)
    for answer in answers:
        claim = answer.claim
        runs, _, after = answer.command.partition(" && ")
        needs_features = claim.name.startswith(("fedfm:features", "fedfm:silhouette"))
        expected = "fedcli quality runs/tables/fedfm-V" if needs_features else ""
        assert after == expected
        program, command, name, *options = shlex.split(runs)
        assert [program, command, name] == ["fedcli", "table", claim.table]
        flags_with_values = zip(options[::2], options[1::2], strict=True)
        only = [value for flag, value in flags_with_values if flag == "--only"]

        table = registry.find_table(claim.table)
        planned = plans.plan_table(table, only=only, seeds=[0])
        cells = set()
        for other_row in claim.other_rows:
            for contrast in pairs.find_contrasts(claim, table, other_row):
                for cell in (contrast.cell, contrast.other_cell):
                    cells.add((cell.row, cell.column))
        assert {(cell.cell.row, cell.cell.column) for cell in planned.cells} == cells
    assert f"| decided by `{answers[0].command}` |\n" in render(claim_tables.build_claims_table(answers))
    assert not any(answer.command for answer in claims.answer_claims(registry.claims(), [], lambda name: False))


def test_every_claim_stands_in_its_table_with_the_papers_sign():
    absent = Claim("fedfa:x", "x", "fedfa:2", "FedFA", ("FedAvg",), ("No such column",))
    with raises_user_error("a cell that fedfa:2 does not have (got FedFA / No such column)"):
        claims.answer_claims([absent], [])

    answers = claims.answer_claims(registry.claims(), [])
    for answer in answers:
        claim = answer.claim
        assert claim.table.partition(":")[0] == claim.name.partition(":")[0]
        if answer.context.paper_difference is None:  # a figure without a number
            assert ":Fig" in claim.table, claim.name
        else:
            assert (answer.context.paper_difference > 0) == (claim.direction == "higher"), claim.name

    printed = {answer.claim.name: answer.context.paper_difference for answer in answers}
    assert len(printed) == len(answers)
    assert printed["fedfm:lite"] == 0.75  # this lead and the next are printed as one number
    assert printed["fedfm:add-on"] == 4.63
    assert {name.partition(":")[0] for name in printed} == {"fedfm", "fedfa", "fedcme", "fccl", "fedsa"}


def test_images_that_clients_keep_for_testing_count_as_in_the_runs_that_were_timed(tmp_path):
    """A record has the sizes of the clients' whole parts, of which FedSA's protocols test on a share."""
    (tmp_path / "a-gpu-torch2.csv").write_text(
        "workload,device,method,hardware,precision,examples_per_second,seconds_per_round,test_seconds\n"
        "w3,cuda,fedavg,a GPU,float32,1000,40,10\n"
    )
    table = registry.find_table("fedsa:1")
    planned = plans.plan_table(table, tmp_path, only=["LG-FedAvg", "cross-silo Cifar10"], seeds=[0])
    run = planned.runs[0]
    config = run.setup.config
    assert config.local_test
    timed = deciding_runs.tabulate_benchmarks(tmp_path)
    timed["backbone"] = config.backbone
    timed["precision"] = config.precision
    (expected,) = durations.estimate_times([run], timed, "cuda", "")
    examples = 60_000 * config.cohort_size / config.num_clients * config.local_epochs * config.rounds
    assert expected.seconds == pytest.approx(50 / 40_000 * examples)


@pytest.mark.parametrize("name", ["other_rows", "columns", "other_columns", "subtracted_columns"])
def test_a_text_in_the_place_of_several_rows_or_columns_is_refused(name):
    titles = {"other_rows": ("FedAvg",), "columns": ("digits",), name: "digits"}
    words = f"{name} of the claim 'own:ahead' must be a tuple of titles (got 'digits'); write ('digits',)."
    with raises_user_error(words):
        Claim("own:ahead", "one is ahead", "own:1", "FedFA", **titles)


def test_a_claim_is_refused_whose_verdict_would_be_of_another_sentence():
    def claim(**changes):
        return Claim("own:ahead", "one is ahead", "own:1", "FedFA", ("FedAvg",), ("digits",), **changes)

    words = "direction of the claim 'own:ahead' must be higher or lower (got 'Higher'); choose one of them."
    with raises_user_error(words):
        claim(direction="Higher")
    words = "the control of the claim 'own:ahead' must be FedAvg (got 'FedProx'); choose one of them."
    with raises_user_error(words):
        claim(control=Control("FedProx", "longer training"))
