"""fedcli ends where other projects' code has ended, by what agreement/results.json keeps of it."""

import ast
import dataclasses
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from agreement import agree, fedcli_side, page, peer_process, problem, results
from agreement.adapters import refusals
from agreement.bridges import BRIDGES
from agreement.cases import CASES, Case
from agreement.exchange import PeerRun
from agreement.peers import load_peers
from agreement.rows import Package, Quantity
from fedcli import registry
from fedcli.errors import UserError
from tests.slow import marks_of_method
from tests.user_errors import raises_user_error

RESULTS = results.read()
PEERS = load_peers()
CLOSE = 1e-9


def rows_of(case):
    """The peers' rows that are held to a case, each with what is kept of it."""
    for peer in PEERS:
        for row in peer.rows:
            if row.case == case:
                yield peer, row, RESULTS[peer.name].rows[row.label]


def gap(vector, kept):
    """The largest difference of the projections of a vector from those that are kept."""
    return np.abs(np.subtract(results.project(vector), kept.projections)).max()


def cases_of_methods():
    """Returns the name of each case, as a test of its method."""
    return [pytest.param(name, marks=marks_of_method(case.method)) for name, case in CASES.items()]


@pytest.mark.parametrize("case", cases_of_methods())
def test_fedcli_ends_where_the_peers_have_ended_unless_they_differ(case):
    ours = fedcli_side.run_case(*problem.make_federation(CASES[case]))
    held = 0
    for peer, row, kept in rows_of(case):
        held += 1
        gaps = [gap(ours[quantity], part) for quantity, part in kept.quantities.items() if part.projections]
        if kept.agrees:
            assert gaps, (peer.name, row.label)
            assert max(gaps) <= CLOSE, (peer.name, row.label)
        elif gaps:
            assert max(gaps) > results.AGREEMENT_TOLERANCE, (peer.name, row.label)
        else:  # the peer has ended in NaN, which has no difference either
            assert all(part.difference is None for part in kept.quantities.values()), (peer.name, row.label)
    assert held


def test_an_exchange_of_two_examples_is_seen():
    setup, fed = problem.make_federation(CASES["fedavg"])
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
    assert gap(fedcli_side.run_case(setup, fed)[Quantity.SHARED], kept.quantities[Quantity.SHARED]) > CLOSE


def test_a_weight_that_is_off_by_one_example_is_seen():
    setup, fed = problem.make_federation(CASES["fedavg"])
    fed.client_weights[0] -= 1
    (_, _, kept), *_ = rows_of("fedavg")
    assert gap(fedcli_side.run_case(setup, fed)[Quantity.SHARED], kept.quantities[Quantity.SHARED]) > CLOSE


def test_every_difference_has_its_cause_and_its_closing_run():
    for peer in PEERS:
        labels = [row.label for row in peer.rows]
        assert len(set(labels)) == len(labels)
        comparison = RESULTS[peer.name]
        for row in peer.rows:
            assert (row.explanation is None) == comparison.rows[row.label].agrees, (peer.name, row.label)
            if row.explanation is None:
                continue
            assert row.explanation.cause, (peer.name, row.label)
            assert row.explanation.paper_says, (peer.name, row.label)
            if row.explanation.closed_by:
                assert row.explanation.closed_by in peer.rows, (peer.name, row.label)
                assert comparison.rows[row.explanation.closed_by.label].agrees, (peer.name, row.label)


def test_a_label_says_whether_the_peer_is_changed():
    for peer in PEERS:
        for row in peer.rows:
            _, *remarks = row.label.split("; ")
            kinds = [remark.partition(": ")[0] for remark in remarks]
            assert kinds in (["changed"], ["fedcli"], ["changed", "fedcli"], []), (peer.name, row.label)
            assert ("changed" in kinds) == bool(row.change), (peer.name, row.label)


def read_adapter(module):
    """The syntax tree of an adapter, which cannot be imported without its peer."""
    return ast.parse(Path(agree.HERE, "adapters", f"{module}.py").read_text())


def names_of_patches(module):
    """The names under which an adapter has its patches."""
    for part in read_adapter(module).body:
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "PATCHES":
            assert ast.unparse(part.value.func) == "patches_of"
            return {patch.id for patch in part.value.args}
    return set()


def test_every_patch_is_one_of_the_adapter_and_each_of_these_is_made():
    for peer in PEERS:
        patches = {row.change.patch for row in peer.rows if row.change} - {""}
        assert patches == names_of_patches(peer.module), peer.name


def test_an_adapter_applies_the_patch_of_every_run_where_it_runs_it():
    for peer in PEERS:
        applied_in = []
        for part in read_adapter(peer.module).body:
            calls = [node for node in ast.walk(part) if isinstance(node, ast.Call)]
            if any(ast.unparse(call.func) == "patch" and len(call.args) == 2 for call in calls):
                applied_in.append(part.name)
        assert applied_in == (["run"] if names_of_patches(peer.module) else []), peer.name


def test_an_adapter_reads_nothing_of_a_run_that_is_not_there():
    for peer in PEERS:
        fields = {field.name for field in dataclasses.fields(peer.rows[0].config)}
        source = Path(agree.HERE, "adapters", f"{peer.module}.py").read_text()
        for part in ast.walk(ast.parse(source)):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("config", "self.config"):
                assert part.attr in fields, (peer.name, part.lineno)


def test_an_adapter_takes_from_our_own_modules_what_is_there():
    for peer in PEERS:
        nodes = [*ast.walk(read_adapter(peer.module))]
        modules = {}  # of ours that it has as a whole, by name
        for node in nodes:
            if not isinstance(node, ast.ImportFrom) or not node.module.startswith("agreement"):
                continue
            for alias in node.names:
                taken = resolve_name(f"{node.module}.{alias.name}")
                if isinstance(taken, ModuleType):
                    modules[alias.name] = taken
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                assert hasattr(modules[ast.unparse(node.value)], node.attr), (peer.name, node.lineno)


def test_the_page_is_made_of_the_results():
    assert page.PAGE.read_text() == page.make_page(PEERS, RESULTS)


def test_the_page_says_how_large_the_problem_is():
    skew = problem.PARTITIONS["skew"]
    *first, last = skew.sizes
    assert f"{', '.join(map(str, first))} and {last} examples" in page.INTRODUCTION
    (equal_size,) = {*problem.PARTITIONS["equal"].sizes, *problem.PARTITIONS["half"].sizes}
    assert f"or {equal_size} each (equal)" in page.INTRODUCTION
    assert (len(skew.sizes), problem.PARTITIONS["half"].cohort_size) == (4, 2)
    assert (problem.RUN["local_epochs"], problem.ROUNDS, problem.RUN["precision"]) == (2, 3, "float64")


def test_the_page_names_registered_methods_and_those_of_bridges():
    names = {page.format_command(case).split()[0] for case in CASES.values()}
    bridges = {f"agreement/bridges.py:{name}" for name in BRIDGES}
    assert names <= registry.methods().keys() | bridges


def test_the_page_says_which_network_a_run_has_unless_it_is_that_of_all():
    assert page.format_command(CASES["fedavg"]) == "fedavg"
    assert (
        page.format_command(CASES["fedavg, batch norm"]) == "fedavg --backbone=agreement/small_networks.py:batch_norm"
    )


def final_vector(method, *, options, run_options=None, partition="equal"):
    """The server's model at the end of a run of fedcli."""
    case = Case(method, options=options, run_options=run_options or {}, partition=partition)
    return fedcli_side.run_case(*problem.make_federation(case))[Quantity.SHARED]


def test_bridges_take_the_options_of_their_methods():
    without_momentum = {"server_momentum": 0.0, "server_lr": 0.5}
    torch.testing.assert_close(
        final_vector("nesterov", options=without_momentum), final_vector("fedavgm", options=without_momentum)
    )
    momentum = {"momentum": 0.5, "lr": 0.03}
    torch.testing.assert_close(
        final_vector("scaffold_with_uniform_control", options={}, run_options=momentum),
        final_vector("scaffold", options={}, run_options=momentum),
    )
    clipped = final_vector("scaffold_after_momentum", options={"clip_norm": 0.1})
    assert not torch.allclose(clipped, final_vector("scaffold_after_momentum", options={"clip_norm": 0.0}))


@pytest.mark.parametrize(
    ("options", "run_options", "refusal"),
    [
        ({"adaptive": True}, {}, "leave out --adaptive"),
        ({}, {"momentum": 0.9}, "leave out --optimizer, --momentum and --weight-decay"),
        ({}, {"weight_decay": 0.1}, "leave out --optimizer, --momentum and --weight-decay"),
        ({}, {"optimizer": "adam"}, "leave out --optimizer, --momentum and --weight-decay"),
    ],
)
def test_a_bridge_refuses_an_option_that_it_would_not_follow(options, run_options, refusal):
    with raises_user_error(refusal):
        final_vector("apfl_keeping_the_mixture", options=options, run_options=run_options)


def make_clone(folder):
    """A repository with one file; returns its commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    agree.read_output("git", "init", "-q", str(folder))
    (folder / "server.py").write_text("x = 1\n")
    agree.read_output(*git, "add", ".")
    agree.read_output(*git, "commit", "-q", "-m", "x")
    return agree.read_output(*git, "rev-parse", "HEAD")


def test_a_clone_that_is_missing_at_another_commit_or_changed_is_refused(tmp_path):
    clone = tmp_path / "clone"
    peer = next(peer for peer in PEERS if peer.commit)
    with raises_user_error("there is no clone of"):
        agree.check_clone(clone, peer)
    clone.mkdir()
    with raises_user_error(f"is no clone of {peer.name} (fatal: not a git repository"):
        agree.check_clone(clone, peer)
    at_commit = dataclasses.replace(peer, commit=make_clone(clone))
    agree.check_clone(clone, at_commit)
    with raises_user_error("is at another commit"):
        agree.check_clone(clone, peer)
    (clone / "server.py").write_text("x = 2\n")
    with pytest.raises(UserError, match=r"was changed since its commit(.|\n)*server.py"):
        agree.check_clone(clone, at_commit)
    for number in range(20):
        (clone / f"{number}.py").touch()
    with pytest.raises(UserError, match=r"21 by git:(.|\n)*server.py") as refusal:
        agree.check_clone(clone, at_commit)
    assert len(str(refusal.value).splitlines()) == 1 + agree.NUM_LISTED_CHANGES


def test_an_environment_without_the_version_of_a_package_is_refused():
    agree.check_package(sys.executable, Package("numpy", np.__version__))
    with raises_user_error(f"does not have numpy 0.1 (got {np.__version__}"):
        agree.check_package(sys.executable, Package("numpy", "0.1"))
    with raises_user_error("does not have not-a-package 0.1 (got none"):
        agree.check_package(sys.executable, Package("not-a-package", "0.1"))


@pytest.mark.parametrize("num_values", [0, 1, 4])
def test_values_that_are_not_as_many_as_those_of_fedcli_are_refused(num_values):
    (peer,) = agree.choose_peers(["FedDecorr"])
    (row,) = peer.rows
    run = {Quantity.SHARED: torch.zeros(num_values, dtype=torch.float64)}
    peer_run = PeerRun({row.label: run}, "3", "2")
    ours = {row.case: {Quantity.SHARED: torch.zeros(5, dtype=torch.float64)}}
    with raises_user_error(f"FedDecorr, '{row.label}', has {num_values} values of 'shared' and fedcli 5"):
        agree.compare(peer, peer_run, ours)


def test_what_is_not_finite_in_fedcli_is_not_said_of_the_peer():
    (peer,) = agree.choose_peers(["FedDecorr"])
    (row,) = peer.rows
    run = {Quantity.SHARED: torch.zeros(5, dtype=torch.float64)}
    ours = {row.case: {Quantity.SHARED: torch.full((5,), torch.nan, dtype=torch.float64)}}
    with raises_user_error("fedcli's own 'shared' in 'feddecorr' is not finite"):
        agree.compare(peer, PeerRun({row.label: run}, "3", "2"), ours)


def test_a_quantity_that_fedcli_does_not_end_with_is_refused():
    (peer,) = agree.choose_peers(["FedDecorr"])
    (row,) = peer.rows
    run = {Quantity.KEPT: torch.zeros(5, dtype=torch.float64)}
    ours = {row.case: {Quantity.SHARED: torch.zeros(5, dtype=torch.float64)}}
    with raises_user_error("has 'kept', which fedcli does not end with in 'feddecorr' (it has shared"):
        agree.compare(peer, PeerRun({row.label: run}, "3", "2"), ours)


def test_what_clients_keep_is_not_compared_where_some_have_kept_nothing_yet():
    took_part = {0: (torch.zeros(2),), 2: (torch.ones(2),)}
    state = SimpleNamespace(clients=took_part)
    assert fedcli_side.read_client_states(state, num_clients=4) == {}
    (kept,) = fedcli_side.read_client_states(state, num_clients=2).values()
    assert kept.tolist() == [0, 0, 1, 1]


def test_a_difference_just_above_the_tolerance_does_not_agree():
    theirs = torch.tensor([1.04e-12], dtype=torch.float64)
    comparison = agree.compare_vectors(theirs, torch.zeros(1, dtype=torch.float64))
    assert not results.RowComparison({Quantity.SHARED: comparison}).agrees


def test_a_peer_that_exits_fails_in_its_row_alone():
    def run(config, problem, patch):
        sys.exit(2)

    (row,) = agree.choose_peers(["FedDecorr"])[0].rows
    failure = peer_process.run_row(row, SimpleNamespace(run=run), None)
    assert "SystemExit: 2" in failure.traceback


def test_a_peer_whose_process_fails_is_named_with_its_environment(tmp_path):
    (peer,) = agree.choose_peers(["FedDecorr"])
    python = tmp_path / "envs" / "all" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with raises_user_error(f"the adapter of FedDecorr does not run in '{python}'"):
        agree.run_peer(peer, tmp_path, tmp_path)


def test_a_page_of_no_results_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "agreement.md")
    with raises_user_error("there are no results (looked for '", "results.json')"):
        page.write({})
    assert not page.PAGE.exists()


def test_a_row_that_differs_itself_closes_no_other():
    label = "FedAvg; fedcli: plain means"
    of_fluke = RESULTS["fluke"]
    comparisons = {**of_fluke.rows, label: of_fluke.rows["FedAvg"]}
    differing = dataclasses.replace(of_fluke, rows=comparisons)
    (peer,) = agree.choose_peers(["fluke"])
    closed = next(row for row in peer.rows if row.label == "FedAvg")
    closed_by = next(row for row in peer.rows if row.label == label)
    explanation = dataclasses.replace(closed.explanation, closed_by=closed_by)
    rows = tuple(dataclasses.replace(row, explanation=explanation) if row is closed else row for row in peer.rows)
    with raises_user_error(f"fluke, 'FedAvg', is not closed by '{label}', which differs too"):
        page.make_page([dataclasses.replace(peer, rows=rows)], {"fluke": differing})


def test_a_row_that_agrees_has_no_cause():
    (peer,) = agree.choose_peers(["fluke"])
    explanation = next(row.explanation for row in peer.rows if row.explanation is not None)
    agreeing = next(row for row in peer.rows if RESULTS["fluke"].rows[row.label].agrees)
    rows = [dataclasses.replace(row, explanation=explanation) if row is agreeing else row for row in peer.rows]
    with raises_user_error("agrees, and says why it differs"):
        page.make_page([dataclasses.replace(peer, rows=tuple(rows))], RESULTS)


def test_the_page_has_the_peers_that_have_results():
    text = page.make_page(PEERS, {"FedNTD": RESULTS["FedNTD"]})
    assert "## FedNTD" in text
    assert "## fluke" not in text


def test_an_optimizer_that_a_peer_does_not_have_is_refused():
    of_case = problem.make_problem(CASES["fedavg"])
    refusals.refuse_momentum(of_case)
    with pytest.raises(ValueError, match=r"without momentum \(got 0.5"):
        refusals.refuse_momentum(dataclasses.replace(of_case, momentum=0.5))
    refusals.refuse_weight_decay(of_case, fixed=0.1)
    with_decay = dataclasses.replace(of_case, weight_decay=0.5)
    refusals.refuse_weight_decay(with_decay, fixed=0.5)
    with pytest.raises(ValueError, match=r"with weight decay 0.1 \(got 0.5"):
        refusals.refuse_weight_decay(with_decay, fixed=0.1)


@pytest.mark.parametrize("module", ["fl_simulator", "flbench", "flower", "fluke", "niid_bench", "pfllib", "plain_loop"])
def test_every_adapter_takes_the_optimizer_of_the_problem_or_refuses_it(module):
    nodes = [*ast.walk(read_adapter(module))]
    read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert "problem.momentum" in read or "refuse_momentum" in called
    assert "problem.weight_decay" in read or "refuse_weight_decay" in called


def test_a_name_of_no_peer_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "check_peer", None)
    monkeypatch.setattr(agree, "run_and_compare", None)
    with raises_user_error("there is no peer 'flukes'; choose from fluke, Flower, "):
        agree.main(tmp_path, only=["fluke", "flukes"])


def test_a_peer_that_is_not_at_hand_is_refused_before_anything_runs(tmp_path, monkeypatch):
    python = tmp_path / "envs" / "fluke" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(agree, "check_package", lambda python, package: None)
    monkeypatch.setattr(agree, "run_and_compare", None)
    with raises_user_error("FedNTD has no environment (looked for '", "fedntd", "all"):
        agree.main(tmp_path, only=["fluke", "FedNTD"])


def test_a_row_of_a_peer_that_is_not_run_has_a_result_or_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "check_peer", lambda peer, peers_folder: None)
    monkeypatch.setattr(agree, "run_and_compare", None)
    of_fedntd = dataclasses.replace(RESULTS["FedNTD"], rows={})
    monkeypatch.setattr(results, "read", lambda: {**RESULTS, "FedNTD": of_fedntd})
    label = "FedNTD, its loss in a plain loop"
    with raises_user_error(f"there is no result of FedNTD, '{label}'; run this peer again"):
        agree.main(tmp_path, only=["fluke"])
    with raises_user_error(f"there is no result of FedNTD, '{label}'; run this peer again"):
        page.make_page(PEERS, results.read())


def test_the_results_are_written_after_each_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    monkeypatch.setattr(agree, "run_fedcli", lambda chosen, exchange_folder: {})
    monkeypatch.setattr(agree, "compare", lambda peer, peer_run, fedcli_runs: RESULTS[peer.name])

    def run_peer(peer, peers_folder, exchange_folder):
        if peer.name == "FedNTD":
            raise KeyboardInterrupt

    monkeypatch.setattr(agree, "run_peer", run_peer)
    with pytest.raises(KeyboardInterrupt):
        agree.run_and_compare(agree.choose_peers(["FedDecorr", "FedNTD"]), tmp_path, {"fluke": RESULTS["fluke"]})
    assert results.read() == {"fluke": RESULTS["fluke"], "FedDecorr": RESULTS["FedDecorr"]}


def test_peers_are_chosen_by_name_and_all_without_one():
    assert agree.choose_peers(["FedNTD", "fluke"]) == [peer for peer in PEERS if peer.name in ("fluke", "FedNTD")]
    assert agree.choose_peers([]) == PEERS


def test_fedcli_runs_the_cases_of_the_chosen_rows_alone(tmp_path, monkeypatch):
    (fedntd,) = agree.choose_peers(["FedNTD"])
    ran = []
    monkeypatch.setattr(fedcli_side, "run_case", lambda setup, fed: ran.append(setup.method.name))
    assert [*agree.run_fedcli([fedntd], tmp_path)] == ["fedntd", "fedntd, tau 3"]
    assert len([*tmp_path.iterdir()]) == 2
    assert ran == ["fedntd", "fedntd"]


def test_the_problem_of_a_case_has_its_optimizer():
    of_case = problem.make_problem(CASES["fedavg, momentum"])
    assert (of_case.lr, of_case.momentum, of_case.weight_decay) == (0.03, 0.9, 1e-3)


def test_the_problem_of_a_case_has_its_epochs_and_batches():
    case = Case("fedavg", run_options={"local_epochs": 3, "batch_size": 8})
    of_case = problem.make_problem(case)
    assert (of_case.epochs, of_case.batch_size) == (3, 8)
    assert len(of_case.batches[0, 0, 0]) == 3  # of 23 examples
    of_whole_batches = problem.make_problem(CASES["fedavg, drop last"])
    assert of_whole_batches.batches == problem.make_problem(CASES["fedavg"]).batches
