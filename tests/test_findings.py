"""Findings of studies against hand numbers of small runs."""

import pytest

from fedcli.errors import UserError
from fedcli.results.pages import finding, read_study
from tests.test_tables import record, write


def run(method, seed, accuracy, **options):
    made = record(method, seed, protocol="fedfm:niid-1", **options)
    made["summary"]["last"] = accuracy
    made["rounds"][-1]["test_accuracy"] = accuracy
    made["rounds"][-1]["classifier_accuracy"] = 0.9
    made["cost"]["memory_floats"] = 12345
    return made


PRINTED = ["fedfa:2", "FMNIST #C=2"]
GROUPS = {
    "FedFA": [run("one", 0, 0.75), run("one", 1, 0.85)],
    "FedAvg": [run("two", 0, 0.60), run("two", 1, 0.80), run("two", 2, 0.10)],
    "twice": [run("two", 0, 0.60), run("two", 0, 0.70)],
    "other clients": [run("two", 1, 0.5) | {"partition": {"fingerprint": "another"}}],
}


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        # 75 - 60 and 85 - 80: the mean 10 with a half-width of 12.7062 * 5, Student's t with one degree of freedom
        ({"than": "FedAvg"}, "FedFA - FedAvg, last round: +10.00 [-53.53, +73.53] (2)"),
        ({"says": "It is high"}, "It is high. FedFA, last round: 80.00 [16.47, 143.53] (2)"),
        ({"of": "other clients"}, "other clients, last round: 50.00 (1)"),
        ({"metric": "memory-floats"}, "FedFA, memory floats: 12,345"),
        ({"metric": "classifier-of-last:1", "than": "FedAvg", "than_metric": "last"},
            "FedFA (classifier of last 1) - FedAvg (last round): +20.00 [-107.06, +147.06] (2)"),
        ({"than": "FedAvg", "paper": PRINTED}, "FedFA - FedAvg, last round: +10.00 [-53.53, +73.53] (2); paper +9.48"),
        ({"paper": PRINTED}, "FedFA, last round: 80.00 [16.47, 143.53] (2); paper 84.08"),
    ],
)  # fmt: skip
def test_a_finding_is_what_the_records_say(entry, line):
    assert finding({"metric": "last", "of": "FedFA", **entry}, GROUPS) == line


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"than": "twice"}, "the runs of seed 0 are no pair: several"),
        ({"than": "other clients"}, "the runs of seed 1 are no pair: .* or of other data or partitions"),
        ({"metric": "quality:nmi"}, "no run has this value"),
        ({"than": "FedAvg", "paper": ["fedfa:2", "no such column"]}, "fedfa:2 has no number in no such column"),
    ],
)
def test_a_finding_that_the_records_do_not_bear_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        finding({"metric": "last", "of": "FedFA", **entry}, GROUPS)


def test_a_file_names_groups_by_folders_and_errors_name_the_file(tmp_path):
    study = tmp_path / "study"
    write(study / "a" / "seed-0", run("one", 0, 0.75))
    write(tmp_path / "other" / "seed-1", run("one", 1, 0.85))
    (study / "intro.md").write_text("# A study\n")
    assert read_study(study).findings == []
    file = study / "findings.toml"
    file.write_text('[runs]\nmine = ["a", "../other"]\n[[findings]]\nmetric = "last"\nof = "mine"\n')
    assert read_study(study).findings == ["mine, last round: 80.00 [16.47, 143.53] (2)"]
    for text, message in (
        ("runs = ", "findings.toml cannot be read"),
        ('[runs]\nmine = "b"', "findings.toml cannot be read .there is no run.* got b"),
        ('[[findings]]\nmetric = "last"\nof = "mine"', "findings.toml cannot be read .'mine'; got .*'last'"),
        ('[runs]\nmine = "a"\n[[findings]]\nof = "mine"', "findings.toml cannot be read .'metric'"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            read_study(study)
