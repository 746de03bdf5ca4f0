"""Numbers in prose against hand numbers of three small runs."""

import pytest

from fedcli.errors import UserError
from fedcli.results.prose import fill_in
from tests.test_tables import record, write


def curve(method, seed, accuracies, **options):
    run = record(method, seed, done=len(accuracies), **options)
    for entry, accuracy in zip(run["rounds"], accuracies, strict=True):
        entry["test_accuracy"] = accuracy
    run["summary"]["last"] = accuracies[-1]
    run["partition"]["sizes"] = [1200, 30 + seed]
    return run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write(folder / "a" / "seed-0", curve("one", 0, (0.1, 0.5, None, 0.75), protocol="fedfm:niid-1", lr=1e-5))
    write(folder / "a" / "seed-1", curve("one", 1, (0.1, 0.2, None, 0.85), protocol="fedfm:niid-1", lr=1e-5))
    write(folder / "c" / "seed-1", curve("two", 1, (0.3, 0.9, None, 0.8), protocol="fedfm:niid-1", lr=0.01))
    write(folder / "b" / "seed-0", curve("two", 0, (0.3, 0.4, None, 0.6), protocol="fedfm:niid-1", lr=0.01))
    return folder


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("last a", "80.00"),
        ("last a : 1", "80.0"),
        ("last a - last b/seed-0 : 0", "20"),
        ("last b - last a : +1", "-20.0"),
        ("last a - last b : +1", "+20.0"),
        ("mean-of-last:3 a/seed-0", "62.50"),  # rounds 2 and 4; 3 was not tested
        ("least-of-last:3 a", "35.00"),  # the mean over seeds of 50 and 20
        ("most-of-last:3 a/seed-0", "75.00"),
        ("deviation-of-last:2 a/seed-0", "0.00"),
        ("deviation-of-last:3 a/seed-0 : 3", "17.678"),  # 25 / sqrt(2)
        ("largest-step a/seed-0", "40.00"),
        ("round:2 b", "40.00"),
        ("best-round a", "4"),
        ("config.lr a", "1e-05"),
        ("config.lr b", "0.01"),
        ("config.rounds a", "4"),
        ("protocol.rounds a", "100"),
        ("model.parameters a", "12,345"),
        ("rounds b + 1", "5"),
        ("least partition.sizes a", "30"),
        ("most partition.sizes a", "1,200"),
        ("least last a", "75.00"),
        ("most last a,b : 0", "85"),
        ("last a/seed-1,b", "72.50"),
        ("rounds-ahead a/seed-0,a/seed-1 b", "2"),
        ("rounds-ahead a b", "2"),  # of seed 0 alone, which both have: rounds 2 and 4
        ("rounds-ahead b a", "1"),
        ("largest-gap a b", "20.00"),  # of seed 0 alone: 20, 10 and 15 points
        ("largest-gap b a : 0", "20"),
        ('printed fedfa:2 FedAvg "FMNIST #C=2"', "74.60"),
        ("lead last a b", "+15.00 (1)"),  # of seed 0 alone
        ("lead last b a : +2", "-15.00 (1)"),
        # 75 - 60 and 85 - 80: the mean 10 with a half-width of 12.7062 * 5, Student's t with one degree of freedom
        ("lead last a b,c", "+10.00 [-53.53, +73.53] (2)"),
        ("lead best-round a c", "+2.0 (1)"),
    ],
)
def test_a_number_is_what_the_records_say(study, expression, number):
    assert fill_in(f"It is {{{{ {expression} }}}}, so.", study) == f"It is {number}, so."


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("last b - last a", "is negative .got -20"),
        ("last d", "there is no record at"),
        ("lead last b a", "is negative .got -15"),
        ("lead last b c", "no seed that both have"),
        ("lead last a/seed-0,b a", "two runs of one seed"),
        ("lead last b a : +1", "a lead in last has 2 decimals"),
        ("lead last a", "a lead is of a metric and two groups of runs"),
        ("lead last a b - 1", "and stands alone"),
        ("lead config.lr a b", "unknown metric"),
        ("lost a", "cannot be read"),
        ("config.seed a", "different values, 0, 1"),
        ("config.nothing a", "cannot be read"),
        ("quality:nmi a", "no run that has it"),
        ("largest-gap a/seed-1 b", "no round that both have tested"),
        ("rounds-ahead b a/seed-1", "no round that both have tested"),
        ("last a -", "no number before a sign"),
        ('printed fedfa:2 FedAvg "FMNIST #C=3"', "cannot be read"),
        ("", "no number before a sign"),
    ],
)
def test_what_cannot_be_read_or_would_turn_a_sentence_round_is_refused(study, expression, message):
    with pytest.raises(UserError, match=message):
        fill_in(f"{{{{ {expression} }}}}", study)
