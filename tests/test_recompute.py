"""The verdicts on claims by a script that shares no code with the package, where runs lack a value."""

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.scripts import load_script

FILE = Path(__file__).parent.parent / "results" / "recompute" / "recompute.py"
recompute = load_script(FILE)


def write_brief_record(folder, accuracy):
    """Writes the parts of a record that the script reads, of one round; a run without an accuracy has diverged."""
    folder.mkdir()
    record = {
        "status": "diverged" if accuracy is None else "finished",
        "config": {"rounds": 1},
        "rounds": [{"test_accuracy": accuracy}],
        "summary": {"selection": "last"},
    }
    (folder / "record.json").write_text(json.dumps(record))
    return str(folder)


def make_claim(folder, differences, lacking):
    """A claim of a row that is ahead by so much in each of two columns, by seed.

    Of a seed in `lacking`, the run of that row has no value in the second column.
    """
    pairs = []
    for seed, of_columns in enumerate(differences):
        for column, difference in enumerate(of_columns):
            accuracies = {"FedFA": 0.5 + difference, "FedAvg": 0.5}
            if column == 1 and seed in lacking:
                accuracies[lacking[seed]] = None
            runs = {row: write_brief_record(folder / f"{row}-{seed}-{column}", accuracies[row]) for row in accuracies}
            pairs.append({
                "seed": seed, "share": 0.5, "than": "FedAvg", "metric": "last", "folder": runs["FedFA"],
                "metric_than": "last", "folder_than": runs["FedAvg"],
            })  # fmt: skip
    return pd.Series({
        "pairs": json.dumps(pairs), "direction": "higher", "metric": "last", "than": "FedAvg", "tail": float("nan"),
    })  # fmt: skip


AHEAD = [(0.10, 0.12), (0.11, 0.13), (0.12, 0.14), (0.13, 0.15)]
BEHIND = [(-ahead, -ahead_in_second) for ahead, ahead_in_second in AHEAD]


def test_a_seed_without_one_of_its_values_has_no_lead(tmp_path):
    answer = recompute.recompute(make_claim(tmp_path, AHEAD, lacking={3: "FedAvg"}))
    assert answer.lead.n == 3
    assert answer.lead.mean == pytest.approx(12)
    assert answer.verdict == "reproduced"


@pytest.mark.parametrize(
    ("differences", "lacking", "verdict"),
    [
        (AHEAD, {}, "reproduced"),
        (AHEAD, {3: "FedAvg"}, "reproduced"),
        (AHEAD, {3: "FedFA"}, "undecided"),
        (BEHIND, {3: "FedFA"}, "contradicted"),
        (BEHIND, {3: "FedAvg"}, "undecided"),
    ],
)
def test_runs_without_a_value_leave_a_claim_open_if_they_are_of_the_row_ahead(tmp_path, differences, lacking, verdict):
    assert recompute.recompute(make_claim(tmp_path, differences, lacking)).verdict == verdict


def test_a_row_with_too_few_seeds_is_undecided(tmp_path):
    assert recompute.recompute(make_claim(tmp_path, AHEAD[:3], lacking={0: "FedAvg"})).verdict == "undecided"
