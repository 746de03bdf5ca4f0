"""Each law catches the defect it is there for."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from fedcli import check, toy
from fedcli.core import Aux, cross_entropy
from fedcli.core.federation import Federation
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.papers import fedfm
from fedcli.papers.baselines import fedavg, fedproto
from fedcli.registry import find_method
from tests import laws
from tests.defects import (
    CountsOutsideOfState,
    change_absent_clients,
    divide_by_absent_classes,
    divide_by_degrees_of_freedom,
    drop_local_buffers,
    forget_states,
    ignore_mask,
    ignore_states,
    keep_first_states,
    skip_buffers,
    step_in_place,
    weigh_first_clients_most,
)
from tests.fake_cuda_runs import NoGraphs
from tests.toy_methods import STATEFUL, fedavg_round

FEDAVG = find_method("fedavg")
FEDFM = find_method("fedfm")


def plant_defect(method, run_round):
    return replace(method, name="planted", run_round=run_round)


def switch_matching_off(state, cohort, fed, config):
    return fedfm.run_round(state, cohort, fed, replace(config, match_weight=0.0))


def keep_matching_on(state, cohort, fed, config):
    return fedfm.run_round(state, cohort, fed, replace(config, match_weight=1.0, start_round=0))


def normalise_padding(state, cohort, fed, config):
    """FedAvg whose networks are not told which samples are padding; its loss knows."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = fed.network(params, buffers, batch.x)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return loss, Aux(buffers, {"cross_entropy": loss}, features)

    return fedavg_round(state, cohort, fed, local_loss)


def upload_more(state, cohort, fed, config):
    fed.upload(cohort.weights)
    return fedavg.run_round(state, cohort, fed, config)


def download_more(state, cohort, fed, config):
    fed.download(torch.zeros(2), cohort)
    return fedavg.run_round(state, cohort, fed, config)


def upload_all_rows(state, cohort, fed, config):
    fed.upload = lambda stacked, present=None: type(fed).upload(fed, stacked)
    return fedproto.run_round(state, cohort, fed, config)


class Defect(NamedTuple):
    """A law, a method and its planted round, options of the law, and what it says."""

    law: Callable
    method: Method
    run_round: Callable
    options: dict
    match: str


REDUCED = replace(FEDAVG, reduces_to=("fedavg", {}))
DEFECTS = {
    "a term cannot be switched off": Defect(
        laws.law_1_off_is_the_simpler_method, FEDFM, keep_matching_on, {}, "against fedavg"
    ),
    "buffers are not averaged": Defect(
        laws.law_1_off_is_the_simpler_method, REDUCED, skip_buffers, {"backbone": toy.BATCHNORM}, "against fedavg"
    ),
    "a term does nothing": Defect(
        laws.law_2_on_is_not, FEDFM, switch_matching_off, {}, "terms have no effect.*: 0.00e"
    ),
    "state is thrown away": Defect(laws.law_3_state_survives, STATEFUL, forget_states, {}, "not kept"),
    "state is not stored": Defect(laws.law_3_state_survives, STATEFUL, keep_first_states, {}, "took part: 0.00"),
    "state is not read": Defect(
        laws.law_3_state_survives, STATEFUL, ignore_states, {}, "effect of what a client stored"
    ),
    "others are touched": Defect(laws.law_3_state_survives, STATEFUL, change_absent_clients, {}, "client that sat out"),
    "buffers do not come out of a step": Defect(
        laws.law_4_chunking_is_invisible,
        FEDAVG,
        drop_local_buffers,
        {"rounds": 1, "chunks": (1,), "backbone": toy.BATCHNORM},
        "looped against",
    ),
    "padding counts": Defect(laws.law_4_chunking_is_invisible, FEDAVG, ignore_mask, {}, "stacked x 2 against"),
    "the first counts most": Defect(
        laws.law_5_order_is_invisible, FEDAVG, weigh_first_clients_most, {}, "permuted cohort"
    ),
    "the state is changed in place": Defect(
        laws.law_5_order_is_invisible, FEDAVG, step_in_place, {}, "changed in place: 8.00e"
    ),
    "an absent class divides": Defect(
        laws.law_6_edge_data, FEDAVG, divide_by_absent_classes, {"chunk": 1}, "finite, a class nobody has: 1.00"
    ),
    "a batch of one divides": Defect(
        laws.law_6_edge_data, FEDAVG, divide_by_degrees_of_freedom, {"chunk": 4}, "finite, batches of one: 1.00"
    ),
    "rounds are counted outside": Defect(
        laws.law_7_resume_is_invisible, FEDAVG, CountsOutsideOfState(), {}, "resumed after round 1"
    ),
    "clients send more": Defect(
        laws.law_9_costs_are_what_is_sent, FEDAVG, upload_more, {}, "send, counted less declared: 4"
    ),
    "clients are sent more": Defect(
        laws.law_9_costs_are_what_is_sent, FEDAVG, download_more, {}, "sent, counted less declared: 8"
    ),
    "rows of absent classes are sent": Defect(
        laws.law_9_costs_are_what_is_sent, find_method("fedproto"), upload_all_rows, {}, "clients send"
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_law_catches_the_defect(defect):
    planted_defect = DEFECTS[defect]
    method = plant_defect(planted_defect.method, planted_defect.run_round)
    with pytest.raises(laws.LawBroken, match=planted_defect.match):
        planted_defect.law(method, **planted_defect.options)


@pytest.mark.parametrize(("number", "run_round"), [(1, drop_local_buffers), (4, normalise_padding)])
def test_a_law_as_checked_catches_defects_that_only_batch_normalisation_has(number, run_round):
    findings = check.check(plant_defect(REDUCED, run_round), number, "cpu")
    broken = [finding.label for finding in findings if not finding.holds]
    assert 0 < len(broken) < len(findings)
    assert all(label.startswith("BatchNorm, ") for label in broken)


class ClientState(NamedTuple):
    """A mask that changes in every round, by which the server's mean is weighted."""

    is_odd: torch.Tensor  # bool [2]


class StateWithMasks(NamedTuple):
    """A model, and what clients keep."""

    params: dict
    buffers: dict
    clients: dict


def weigh_by_mask(state, cohort, fed, config):
    kept = fed.recall(state.clients, cohort, ClientState(torch.tensor([False, False])))
    after, terms = fedavg.run_round(state, cohort, fed, config)
    factor = 1 + kept.is_odd.double().mean() / 10
    params = {name: factor * value for name, value in after.params.items()}
    clients = fed.remember(state.clients, cohort, ClientState(~kept.is_odd))
    return StateWithMasks(params, after.buffers, clients), terms


def test_law_3_holds_for_a_method_whose_clients_keep_a_mask():
    """The law changes the mask into another mask, not into numbers."""
    method = plant_defect(FEDAVG, weigh_by_mask)
    method = replace(
        method,
        init=lambda fed, config: StateWithMasks(*fedavg.init(fed, config), {}),
        state_types=(StateWithMasks, ClientState),
        costs=None,
    )
    findings = check.check(method, 3, "cpu")
    assert len(findings) == 4
    assert all(finding.holds for finding in findings)


def test_law_7_catches_a_class_of_the_state_that_is_not_declared():
    with pytest.raises(UserError, match="got 'ClientState'"):
        laws.law_7_resume_is_invisible(replace(STATEFUL, state_types=STATEFUL.state_types[:1]))


@pytest.mark.parametrize("number", [1, 5, 7])
def test_a_method_that_allows_no_sgd_is_held_to_the_laws_with_its_own_optimizer(number):
    """The laws find out its defect."""
    adam_alone = replace(FEDAVG, optimizers=("adam",), reduces_to=("fedavg", {}))
    findings = check.check(adam_alone, number, "cpu")
    assert findings
    assert all(finding.holds for finding in findings)
    planted = replace(adam_alone, run_round=weigh_first_clients_most)
    if number == 5:
        assert not all(finding.holds for finding in check.check(planted, number, "cpu"))


def test_a_law_is_held_against_the_variants_of_a_method():
    """The defect is in what only the variant does."""

    def change_absent_clients_when_pulled_hard(state, cohort, fed, config):
        defect = change_absent_clients if config.pull_weight > 1 else STATEFUL.run_round
        return defect(state, cohort, fed, config)

    method = replace(
        plant_defect(STATEFUL, change_absent_clients_when_pulled_hard), variants={"hard": {"pull_weight": 2.0}}
    )
    (variant,) = check.variants_of(method)
    laws.law_3_state_survives(method)
    assert variant.name == "planted (hard)"

    with pytest.raises(laws.LawBroken, match="client that sat out"):
        laws.law_3_state_survives(variant)


def test_a_variant_with_an_option_that_the_method_has_not_is_refused_by_name():
    method = replace(STATEFUL, variants={"hard": {"pull_wight": 2.0}})
    words = f"^unknown option in the variant 'hard' of '{STATEFUL.name}' 'pull_wight'; did you mean 'pull_weight'"
    with pytest.raises(UserError, match=words):
        check.variants_of(method)


def test_a_figure_that_is_not_a_number_keeps_no_bound():
    assert not check.Finding("", float("nan"), at_most=1).holds
    assert not check.Finding("", float("nan"), more_than=1).holds


def test_law_4_holds_captured_steps_to_the_plain_ones_where_the_device_has_graphs(monkeypatch):
    class OnGraphs(Federation):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.engine.graphs = NoGraphs()

    monkeypatch.setattr(toy, "Federation", OnGraphs)
    findings = check.law_4_chunking_is_invisible(FEDAVG, chunks=(4, "branches:4"))
    ways = ("stacked x 4", "branches x 4", "stacked x 4, captured", "branches x 4, captured")
    assert [finding.label for finding in findings] == [f"{way} against looped" for way in ways]

    capture = NoGraphs.capture

    def replays_once(graphs, work):
        """A replay that does nothing after the first time, which the engine itself compares with the step."""
        replay = capture(graphs, work)
        is_replayed = False

        def replay_once():
            nonlocal is_replayed
            if not is_replayed:
                replay()
            is_replayed = True

        return replay_once

    monkeypatch.setattr(NoGraphs, "capture", replays_once)
    *_, replayed = check.law_4_chunking_is_invisible(FEDAVG, chunks=(4,))
    assert replayed.label == "stacked x 4, captured against looped"
    assert not replayed.holds
