"""The made-up device finds what does not work on CUDA: faults are planted in the product, and its rules are broken."""

import re
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from fedcli.core import batches
from fedcli.core.graphs import CudaGraphs
from fedcli.core.stacked import Stack
from fedcli.core.trees import tree_map
from fedcli.registry import find_method
from tests import laws
from tests.made_up import Device, Graph, Pool, RaceError
from tests.on_made_up import early_captures, on_cpu, on_device, on_made_up_device

FEDAVG = find_method("fedavg")


# Faults that steps, replayed by a graph, could have


@contextmanager
def learning_rate_of_the_first_round():
    train = Stack.train

    def wrong(self, clients, context, rows, rate, *rest):
        return train(self, clients, context, rows, rate if self.clients is None else self._rate, *rest)

    with patch.object(Stack, "train", wrong):
        yield


@contextmanager
def number_of_the_step_from_python():
    step, taken = Stack.step, {}

    def wrong(self, padded, is_captured=False):
        taken[self] = taken.get(self, 0) + 1
        self._number.fill_(taken[self] % len(self._rows.index))
        return step(self, padded, is_captured)

    with patch.object(Stack, "step", wrong):
        yield


@contextmanager
def clients_in_new_tensors():
    step = Stack.step

    def wrong(self, padded, is_captured=False):
        self.clients = tree_map(torch.clone, self.clients)
        return step(self, padded, is_captured)

    with patch.object(Stack, "step", wrong):
        yield


@contextmanager
def sums_in_the_memory_of_a_graph():
    step = Stack.step

    def wrong(self, padded, is_captured=False):
        step(self, padded, is_captured)
        self.totals = tree_map(lambda total: total + 0, self.totals)

    with patch.object(Stack, "step", wrong):
        yield


@contextmanager
def step_number_in_a_new_tensor():
    train = Stack.train

    def wrong(self, *arguments):
        results = train(self, *arguments)
        self._number = self._inputs.number.clone()
        self._inputs = self._inputs._replace(number=self._number)
        return results

    with patch.object(Stack, "train", wrong):
        yield


@contextmanager
def branches_that_nobody_waits_for():
    def wrong(self, streams, works):
        ambient, results = torch.cuda.current_stream(), []
        for work, stream in zip(works, streams, strict=True):
            stream.wait_stream(ambient)
            with torch.cuda.stream(stream):
                results.append(work())
        return results

    with patch.object(CudaGraphs, "_work_on", wrong):
        yield


@contextmanager
def branches_that_do_not_wait():
    def wrong(self, streams, works):
        ambient, results = torch.cuda.current_stream(), []
        for work, stream in zip(works, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams:
            ambient.wait_stream(stream)
        return results

    with patch.object(CudaGraphs, "_work_on", wrong):
        yield


def numbers_on_the_host():
    def wrong(values, dtype, device):
        return torch.tensor(values, dtype=dtype)[:, None, None]

    return patch.object(batches, "_per_channel", wrong)


def numbers_copied_in_every_step():
    def wrong(values, dtype, device):
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

    return patch.object(batches, "_per_channel", wrong)


def in_the_loss(change):
    """FedAvg's loss is changed by a function of its value and the batch."""
    make_local_loss = FEDAVG.module.make_local_loss

    def make_wrong_loss(network):
        right = make_local_loss(network)

        def wrong(params, buffers, batch, context):
            value, aux = right(params, buffers, batch, context)
            return change(value, batch), aux

        return wrong

    return patch.object(FEDAVG.module, "make_local_loss", make_wrong_loss)


def list_of_numbers_in_a_loss():
    return in_the_loss(lambda value, batch: value * torch.tensor([1.0, 2.0], device=value.device).sum())


def value_read_in_a_loss():
    return in_the_loss(lambda value, batch: value * (1 + batch.lr.item()))


def tensor_of_the_host_in_a_loss():
    return in_the_loss(lambda value, batch: (value + torch.zeros(3, dtype=value.dtype)).mean())


NOT_CAPTURED = "no CUDA graph of the step.*operation not permitted when stream is capturing"
FREED = "a graph reads or writes memory that has been freed"
OTHER_DEVICE = "Expected all tensors to be on the same device"
PLANTED = {  # each fault with the way in which clients train together, and with what is said of it
    learning_rate_of_the_first_round: ("4", "other bits"),
    number_of_the_step_from_python: ("4", "a CUDA graph of the step gave other numbers"),
    clients_in_new_tensors: ("4", FREED),
    sums_in_the_memory_of_a_graph: ("4", FREED),
    step_number_in_a_new_tensor: ("4", FREED),
    branches_that_nobody_waits_for: ("branches:4", "a stream does not wait"),
    branches_that_do_not_wait: ("branches:4", "a stream does not wait"),
    numbers_on_the_host: ("4", OTHER_DEVICE),
    numbers_copied_in_every_step: ("4", NOT_CAPTURED),
    list_of_numbers_in_a_loss: ("4", NOT_CAPTURED),
    value_read_in_a_loss: ("4", NOT_CAPTURED),
    tensor_of_the_host_in_a_loss: ("4", OTHER_DEVICE),
}


@pytest.mark.parametrize("name", [fault.__name__ for fault in PLANTED])
@on_made_up_device
def test_a_planted_fault_is_found(name):
    fault = globals()[name]
    chunk, expected = PLANTED[fault]
    run = {"clients_per_chunk": chunk, "lr_decay": 0.5, "local_epochs": 1}
    with early_captures():
        right = on_cpu(FEDAVG, **run)
        with fault():
            try:
                ran = on_device(FEDAVG, **run)
            except RuntimeError as error:
                said = str(error)
            else:
                bits = "other bits" if laws.distance(ran.state, right) else "the same bits"
                said = ", ".join(ran.fed.engine.notes) or bits
    assert re.search(expected, said), said


# The rules of the device


def captured(device, pool, work):
    graph = Graph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
        work()
    return graph


@on_made_up_device
def test_a_capture_does_nothing_and_a_replay_leaves_nothing_but_what_was_there_before():
    with Device.running() as device:
        x, made = torch.ones(3, device="cuda"), []
        graph = captured(device, Pool(), lambda: made.append(x.add_(1) * 2))
        assert x.tolist() == [1, 1, 1]
        graph.replay()
        assert x.tolist() == [2, 2, 2]
        assert made[0].isnan().all()
        assert (device.captures, device.replays) == (1, 1)


@on_made_up_device
def test_a_number_of_the_host_stays_as_it_was_in_the_capture():
    with Device.running() as device:
        x, number = torch.ones(3, device="cuda"), torch.tensor(2.0)
        graph = captured(device, Pool(), lambda: x.mul_(number))
        number.fill_(5)
        graph.replay()
        assert x.tolist() == [2, 2, 2]


@on_made_up_device
def test_a_pool_takes_no_graph_after_a_failed_capture_or_its_last_graph():
    with Device.running() as device:
        x, failed, left = torch.ones(3, device="cuda"), Pool(), Pool()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captured(device, failed, lambda: x.sum().item())
        torch.cuda.set_stream(device.main)
        with pytest.raises(RuntimeError, match="already recording"):
            captured(device, failed, lambda: x.add_(1))
        graph = captured(device, left, lambda: x.add_(1))
        captured(device, left, lambda: x.add_(1))
        del graph
        with pytest.raises(RuntimeError, match="use_count > 0"):
            captured(device, left, lambda: x.add_(1))


@on_made_up_device
def test_a_capture_waits_for_all_branches():
    with Device.running() as device:
        x, branch = torch.ones(3, device="cuda"), torch.cuda.Stream()

        def unjoined():
            branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(branch):
                x.add_(1)

        with pytest.raises(RuntimeError, match="previous error"):
            captured(device, Pool(), unjoined)
        with pytest.raises(RaceError), torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)


@on_made_up_device
def test_what_python_waits_for_is_counted_and_what_it_need_not_wait_for_is_not():
    host = torch.arange(4.0)
    with Device.running() as device:
        x = host.pin_memory().to("cuda", non_blocking=True)
        y = torch.full((4,), 2.0, device="cuda")
        z = (x * y)[torch.tensor([0, 2]).pin_memory().to("cuda", non_blocking=True)]
        assert device.waits.total() == 0
        assert z.tolist() == [0, 4]
        waits = [
            lambda: host.to("cuda"),
            lambda: host.to("cuda", non_blocking=True),
            lambda: torch.tensor(1.0, device="cuda"),
            lambda: x.cpu(),
            lambda: x.sum().item(),
            lambda: x[x > 0],
            lambda: torch.cuda.synchronize(),
        ]
        for number, work in enumerate(waits):
            work()
            assert device.waits.total() == 2 + number
        with pytest.raises(RuntimeError, match="read too early"):
            x.to("cpu", non_blocking=True)


@on_made_up_device
def test_the_fused_step_of_the_device_is_that_of_pytorch():
    draw = torch.Generator().manual_seed(0)
    for momentum, decay in ((0.9, 0.1), (0.9, 0.0), (0.0, 0.1)):
        lists = [[torch.randn(5, generator=draw), torch.randn(2, 3, generator=draw)] for _ in range(3)]
        how = {
            "weight_decay": decay, "momentum": momentum, "dampening": 0.0, "nesterov": False, "maximize": False,
            "is_first_step": False,
        }  # fmt: skip
        with Device.running():
            there = [[tensor.to("cuda") for tensor in tensors] for tensors in lists]
            rate, stop = torch.full((), 0.5, device="cuda"), torch.ones((), device="cuda")
            momenta = there[2] if momentum else []
            torch._fused_sgd_(*there[:2], momenta, lr=rate, found_inf=stop, **how)
            assert torch.equal(there[0][0].cpu(), lists[0][0])
            torch._fused_sgd_(*there[:2], momenta, lr=rate, found_inf=stop - 1, **how)
            after = [[tensor.cpu() for tensor in tensors] for tensors in there]
            turned = [tensor.T.contiguous().T if tensor.dim() == 2 else tensor for tensor in there[1]]
            with pytest.raises(RuntimeError, match="strides"):
                torch._fused_sgd_(there[0], turned, momenta, lr=rate, **how)
            with pytest.raises(RuntimeError, match="scalar type"):
                torch._fused_sgd_(*there[:2], momenta, lr=rate.double(), **how)
        torch._fused_sgd_(*lists[:2], lists[2] if momentum else [], lr=torch.tensor(0.5), **how)
        for ours, theirs in zip(after, lists, strict=True):
            torch.testing.assert_close(ours, theirs)


@on_made_up_device
def test_autocast_multiplies_in_half_precision():
    with Device.running():
        x, weight = torch.ones(2, 3, device="cuda"), torch.ones(4, 3, device="cuda")
        with torch.autocast(x.device.type, torch.bfloat16):
            assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert torch.nn.functional.linear(x, weight).dtype == torch.float32


@on_made_up_device
def test_draws_and_operations_that_cannot_be_repeated_are_noticed():
    with Device.running() as device:
        before = torch.cuda.get_rng_state()
        x = torch.rand(3, device="cuda")
        assert not torch.equal(torch.cuda.get_rng_state(), before)
        x.cumsum(0)
        torch.ones(3, dtype=torch.int64, device="cuda").cumsum(0)
        assert device.unrepeatable.total() == 1
