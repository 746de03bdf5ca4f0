"""fedcli ends where other projects' code has ended, by what agreement/results.json keeps of it."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from agreement import agree, page, problem, results
from agreement.bridges import BRIDGES
from agreement.rows import CASES
from fedcli import registry
from fedcli.errors import UserError

RESULTS = results.read()
PEERS = agree.peers()
CLOSE = 1e-9


def rows_of(case):
    """The peers' rows that are held to a case, each with what is kept of it."""
    for peer in PEERS:
        for row in peer.rows:
            if row.case == case:
                yield peer, row, RESULTS[peer.name].rows[row.label]


def gap(vector, kept):
    """The largest difference of the projections of a vector from those that are kept."""
    return np.abs(np.subtract(problem.projections(vector), kept.projections)).max()


@pytest.mark.parametrize("case", CASES)
def test_fedcli_ends_where_the_peers_have_ended_unless_they_differ(case):
    ours = problem.outcome(*problem.federation(CASES[case]))
    held = 0
    for peer, row, kept in rows_of(case):
        held += 1
        gaps = [gap(ours[what], part) for what, part in kept.comparisons.items() if part.projections]
        largest = max(gaps, default=1)
        if kept.agrees:
            assert largest <= CLOSE, (peer.name, row.label)
        else:
            assert largest > results.SAME, (peer.name, row.label)
    assert held


def test_an_exchange_of_two_examples_is_seen():
    setup, fed = problem.federation(CASES["fedavg"])
    original = fed.plan

    def plan(cohort, epochs=None):
        drawn = original(cohort, epochs)
        if cohort.round == 2:
            last = drawn.index[-1, 3, 0].copy()
            drawn.index[-1, 3, 0] = drawn.index[-2, 3, 0]
            drawn.index[-2, 3, 0] = last
        return drawn

    fed.plan = plan
    (_, _, kept), *_ = rows_of("fedavg")
    assert gap(problem.outcome(setup, fed)["shared"], kept.comparisons["shared"]) > CLOSE


def test_a_weight_that_is_off_by_one_example_is_seen():
    setup, fed = problem.federation(CASES["fedavg"])
    fed.client_weights[0] -= 1
    (_, _, kept), *_ = rows_of("fedavg")
    assert gap(problem.outcome(setup, fed)["shared"], kept.comparisons["shared"]) > CLOSE


def test_every_difference_has_its_cause_and_its_closing_run():
    for peer in PEERS:
        labels = [row.label for row in peer.rows]
        assert len(set(labels)) == len(labels)
        result = RESULTS[peer.name]
        for row in peer.rows:
            differs = not result.rows[row.label].agrees
            assert bool(row.cause) == differs, (peer.name, row.label)
            assert bool(row.decided_by) == differs, (peer.name, row.label)
            if row.closed_by:
                assert result.rows[row.closed_by].agrees, (peer.name, row.label)


def test_every_patch_is_a_function_of_the_adapter():
    for peer in PEERS:
        source = Path(agree.HERE, "adapters", f"{peer.module}.py").read_text()
        functions = {part.name for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)}
        patches = {getattr(row.setup, "patch", "") for row in peer.rows} - {""}
        assert patches <= functions, peer.name


def test_an_adapter_applies_the_patch_of_every_setup_where_it_runs_it():
    for peer in PEERS:
        fields = {field.name for field in dataclasses.fields(peer.rows[0].setup)}
        source = Path(agree.HERE, "adapters", f"{peer.module}.py").read_text()
        applied_in = []
        for part in ast.parse(source).body:
            if isinstance(part, ast.FunctionDef | ast.ClassDef) and "PATCHES[setup.patch]" in ast.unparse(part):
                applied_in.append(part.name)
        assert applied_in == (["run"] if "patch" in fields else []), peer.name


def test_an_adapter_reads_nothing_of_a_setup_that_is_not_there():
    for peer in PEERS:
        fields = {field.name for field in dataclasses.fields(peer.rows[0].setup)}
        source = Path(agree.HERE, "adapters", f"{peer.module}.py").read_text()
        for part in ast.walk(ast.parse(source)):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("setup", "self.setup"):
                assert part.attr in fields, (peer.name, part.lineno)


def test_the_page_is_made_of_the_results():
    assert page.PAGE.read_text() == page.text(PEERS, RESULTS)


def test_the_page_names_registered_methods_and_those_of_bridges():
    names = {page.command(case).split()[0] for case in CASES.values()}
    bridges = {f"bridges.py:{name}" for name in BRIDGES}
    assert names <= registry.methods().keys() | bridges


def test_a_clone_that_is_missing_or_at_another_commit_is_refused(tmp_path):
    peer = next(peer for peer in PEERS if peer.commit)
    with pytest.raises(UserError, match="there is no clone of"):
        agree.check_commit(tmp_path / peer.name, peer)
