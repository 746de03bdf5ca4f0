"""A number that is not finite ends a run in its round, wherever it arises, and reaches no checkpoint."""

import json
from pathlib import Path

import pytest
import torch

import fedcli
from fedcli import check, registry, toy
from fedcli.core import Aux, cross_entropy
from fedcli.core.objectives import LostGradient, NoReading
from fedcli.core.tree_files import read_verified, save_tree
from fedcli.errors import NonFiniteLoss
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from fedcli.runs.resume import resume
from tests import laws
from tests.commands import invoke
from tests.user_errors import raises_user_error

METHOD = '''"""My card."""

from dataclasses import dataclass, replace

import torch
from fedcli import option
from fedcli.core import Aux, cross_entropy, weighted_mean
from fedcli.papers.baselines import fedavg

@dataclass(frozen=True)
class Config:
    pass

def run_round(state, cohort, fed, config):
    late = 0.0 if cohort.round < 1 else 1.0
    nan = 0.0 if cohort.round < 1 else float("nan")

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = fed.network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return LOSS, Aux(buffers, {"loss": loss})

    STEP
    clients, terms = fed.train(fed.broadcast(state.params, state.buffers, cohort), cohort, local)
    state = fedavg.ServerState(*weighted_mean(fed.upload_model(clients), cohort.weights))
    return state, TERMS

METHOD = replace(fedavg.METHOD, name="mine", config=Config, run_round=run_round)
'''
OPTIONS = {
    "dataset": "digits", "train_examples": 60, "num_clients": 3, "cohort_size": 3, "rounds": 3, "local_epochs": 1,
    "batch_size": 32, "device": "cpu", "protocol": "fedfm:digits", "checkpoint_every": 1, "backbone": "cnn-small",
    "validation": 0.0, "partition": "iid",
}  # fmt: skip


@pytest.fixture(autouse=True)
def working(folder):
    """An empty working folder."""


def method(loss="loss", step="local = local_loss", terms="terms"):
    text = METHOD.replace("LOSS", loss).replace("STEP", step).replace("TERMS", terms)
    Path("mine.py").write_text(text)
    return "./mine.py"


def own_step(update):
    """A local step that changes the client behind the optimizer's."""
    lines = [
        "import dataclasses", "base = fed.optimizer_step(local_loss)", "def update(client, batch, context):",
        "    client, aux = base.update(client, batch, context)", f"    {update}",
        "    return client, Aux(aux.buffers, {})",
        "local = dataclasses.replace(base, update=update, in_place=None)",
    ]  # fmt: skip
    return "\n    ".join(lines)


# Of each parameter the first values along the last axis, from the second round on.
FIRST_VALUES = (
    "if late: client = client._replace(params={{k: v.index_fill(-1, torch.tensor([0]), float('{}')) "
    "for k, v in client.params.items()}})"
)
WRONG = {
    "a loss beside finite terms": ({"loss": "loss + nan"}, "the loss is not finite in round 2 for client(s) 0, 1, 2"),
    "a loss that is infinite": ({"loss": "loss + late * 1e300 * 1e300"}, "the loss is not finite in round 2"),
    "a gradient of a finite loss": (
        {"loss": "loss + (logits.sum() * 0).abs().sqrt() if late else loss"},
        "what the step gave is not finite in round 2",
    ),
    "a parameter of a step": (
        {"step": own_step("client = client._replace(params={k: v + nan for k, v in client.params.items()})")},
        "what the step gave is not finite in round 2",
    ),
    "a value of a parameter above all numbers": (
        {"step": own_step(FIRST_VALUES.format("inf"))}, "what the step gave is not finite in round 2",
    ),
    "a value of a parameter below all numbers": (
        {"step": own_step(FIRST_VALUES.format("-inf"))}, "what the step gave is not finite in round 2",
    ),
    "a term that the method makes": (
        {"terms": "{**terms, 'own': terms['loss'] * nan}"}, "the term 'own' is not finite in round 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("chunk", ["1", "3"])
@pytest.mark.parametrize("case", WRONG)
def test_a_number_that_is_not_finite_ends_the_run_before_it_is_written(case, chunk):
    change, words = WRONG[case]
    with pytest.raises(NonFiniteLoss) as caught:
        fedcli.run(method(**change), out="run", clients_per_chunk=chunk, **OPTIONS)
    assert words in str(caught.value)

    record = read_record(Path("run"))
    assert record["status"] == "failed"
    assert len(record["rounds"]) == 1
    assert words in record["error"]

    _, facts, tensors = read_verified(Path("run") / CHECKPOINT)
    assert len(facts["record"]["rounds"]) == 1
    assert all(value.isfinite().all() for value in tensors.values())
    with pytest.raises(NonFiniteLoss):  # it goes on from the round before, and ends in the same way
        resume("run", files="mine.py")
    assert read_record(Path("run"))["status"] == "failed"


def test_the_command_ends_in_a_line_and_json_never_has_nan():
    flags = flags_of(OPTIONS)
    result = invoke("run", method(terms="{'own': terms['loss'] * nan}"), *flags, "--out", "run")
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert "the term 'own' is not finite in round 2" in " ".join(result.output.split())
    json.loads(Path("run/record.json").read_text(), parse_constant=lambda text: pytest.fail(text))


def test_law_6_sees_a_loss_beside_finite_terms():
    law = check.law_6_edge_data(registry.find_method(method(loss="loss + nan")), 1)
    assert not all(finding.holds for finding in law)
    healthy = check.law_6_edge_data(registry.find_method(method()), 4)
    assert all(finding.holds for finding in healthy)


def test_a_public_phase_is_checked_for_what_it_returns_and_for_what_it_leaves():
    _, fed = toy.federation("fedmd")
    cohort = fed.cohort(0)
    batch = next(fed.public_batches(0))
    clients = fed.broadcast(*fed.initial_model(), cohort)

    def phase(outputs):
        def local_loss(params, buffers, batch, context):
            _, logits, buffers = fed.network(params, buffers, batch.x, batch.mask)
            return logits.square().mean(), check_aux(buffers, outputs(logits))

        return fed.step(clients, cohort, local_loss, batch)

    _, aux = phase(lambda logits: logits)
    assert list(aux.terms) == ["size"]
    with pytest.raises(NonFiniteLoss, match="what the step gave is not finite in round 1"):
        phase(lambda logits: logits / 0)


def check_aux(buffers, outputs):
    return Aux(buffers, {"size": outputs.detach().new_zeros(())}, outputs.detach())


def test_a_nan_is_no_part_of_a_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_tree(tmp_path / "file", {"a": torch.zeros(1)}, {"rounds": [float("nan")]})
    assert not (tmp_path / "file").exists()


# Numbers that are taken out of the graph


@pytest.mark.parametrize(
    ("loss", "reader"),
    [
        pytest.param("loss + 0.1 * loss.item()", ".item()", id="item"),
        pytest.param("loss * float(loss)", "float()", id="float"),
        pytest.param("loss + loss.tolist()", ".tolist()", id="tolist"),
        pytest.param("loss + torch.tensor(loss)", "torch.tensor()", id="torch.tensor"),
        pytest.param("loss + torch.tensor(data=loss)", "torch.tensor()", id="torch.tensor by keyword"),
        pytest.param("loss + torch.tensor([[loss, loss]]).sum()", "torch.tensor()", id="torch.tensor of lists"),
        pytest.param("loss + torch.as_tensor([loss, loss]).sum()", "torch.as_tensor()", id="torch.as_tensor"),
        pytest.param("loss + torch.asarray(loss)", "torch.asarray()", id="torch.asarray of a tensor"),
        pytest.param("loss + torch.asarray([loss, loss]).sum()", "torch.asarray()", id="torch.asarray"),
        pytest.param("loss + batch.x.new_tensor(loss)", ".new_tensor()", id="new_tensor"),
        pytest.param("loss + torch.linspace(0, loss, 3).sum()", "torch.linspace()", id="linspace"),
        pytest.param("loss + __import__('math').exp(loss)", "float()", id="math.exp"),
        pytest.param("loss if loss else 2 * loss", "bool()", id="bool"),
    ],
)
def test_a_loss_that_takes_numbers_out_of_parameters_is_refused(loss, reader):
    """As `check` refuses it: it makes a number of Python of what depends on the parameters."""
    name = method(loss=loss)
    with raises_user_error("mine.py' fails in line 21 (got LostGradient: ", reader):
        fedcli.run(name, out="run", **OPTIONS)
    assert read_record(Path("run"))["status"] == "failed"


def test_a_number_taken_out_of_the_graph_is_refused_where_the_first_clients_have_no_example():
    setup, fed = toy.federation("fedavg", parts=toy.toy_parts((0, 0, 5, 9)), clients_per_chunk="1")
    state = laws.initial_state(setup, fed)
    cohort = fed.cohort(0)

    def local_loss(params, buffers, batch, context):
        output = fed.network(params, buffers, batch.x)
        loss = cross_entropy(output.logits, batch.y)
        return loss + 0.1 * loss.item(), Aux(output.buffers, {})

    with pytest.raises(LostGradient, match=r"\.item\(\) makes a number of a tensor"):
        fed.train(fed.broadcast(state.params, state.buffers, cohort), cohort, local_loss)


def test_a_number_that_depends_on_no_parameter_and_a_detached_one_are_taken():
    name = method(loss="loss + 0 * loss.detach().item() + 0 * batch.y.float().mean().item()")
    assert fedcli.run(name, out="run", **OPTIONS).record["status"] == "finished"


def test_what_keeps_a_gradient_is_taken():
    x = torch.ones((), requires_grad=True)
    with NoReading():
        assert torch.as_tensor(x).requires_grad
        assert x.new_tensor([3.0]).item() == 3


@pytest.mark.parametrize("clients_per_chunk", ["1", "4"])
def test_an_objective_that_moves_no_parameter_is_refused_however_clients_train(clients_per_chunk):
    setup, fed = toy.federation("fedavg", clients_per_chunk=clients_per_chunk)
    state = laws.initial_state(setup, fed)
    cohort = fed.cohort(0)

    def local_loss(params, buffers, batch, context):
        output = fed.network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(output.logits, batch.y, batch.mask).detach()
        return loss, Aux(output.buffers, {})

    with raises_user_error("depends on no parameter that moves", "multiply by 0"):
        fed.train(fed.broadcast(state.params, state.buffers, cohort), cohort, local_loss)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_number_taken_out_of_the_graph_of_a_joint_step_is_refused_in_each_thread(threads, two_threads):
    torch.set_num_threads(threads)
    _, fed = toy.federation("fedmd")
    fed.engine.clients_per_chunk = 1
    cohort = fed.cohort(0)
    batch = next(fed.public_batches(0))
    clients = fed.broadcast(*fed.initial_model(), cohort)

    def local_loss(params, buffers, batch, context):
        output = fed.network(params, buffers, batch.x)
        loss = output.logits.square().mean()
        return loss * loss.item(), Aux(output.buffers, {})

    with pytest.raises(LostGradient, match=r"\.item\(\) makes a number of a tensor"):
        fed.step(clients, cohort, local_loss, batch)
