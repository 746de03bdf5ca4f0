"""The fake CUDA device finds what does not work on CUDA: faults are planted in fedcli, and its rules are broken."""

import re
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from fedcli import toy
from fedcli.core import augment
from fedcli.core.graphs import CudaGraphs
from fedcli.core.stacked import Stack
from fedcli.core.trees import tree_map
from fedcli.registry import find_method
from tests.fake_cuda import UNREPEATABLE, FakeCuda, Graph, Pool, RaceError
from tests.fake_cuda_runs import early_captures, on_fake_cuda, run_on_cpu, run_on_fake_cuda

pytestmark = pytest.mark.slow

FEDAVG = find_method("fedavg")


# Faults that steps, replayed by a graph, could have


@contextmanager
def learning_rate_of_the_first_round():
    train = Stack.train

    def wrong(self, clients, context, rows, rate, **others):
        is_first_round = self.clients is None
        return train(self, clients, context, rows, rate if is_first_round else self._lr, **others)

    with patch.object(Stack, "train", wrong):
        yield


@contextmanager
def number_of_the_step_from_python():
    step = Stack.take_step
    steps_taken = Counter()

    def wrong(self, padded, updates):
        steps_taken[self] += 1
        self._step_index.fill_(steps_taken[self] % len(self._rows.index))
        return step(self, padded, updates)

    with patch.object(Stack, "take_step", wrong):
        yield


@contextmanager
def clients_in_new_tensors():
    step = Stack.take_step

    def wrong(self, padded, updates):
        self.clients = tree_map(torch.clone, self.clients)
        return step(self, padded, updates)

    with patch.object(Stack, "take_step", wrong):
        yield


@contextmanager
def sums_in_the_memory_of_a_graph():
    step = Stack.take_step

    def wrong(self, padded, updates):
        step(self, padded, updates)
        self.totals = tree_map(lambda total: total + 0, self.totals)

    with patch.object(Stack, "take_step", wrong):
        yield


@contextmanager
def step_number_in_a_new_tensor():
    train = Stack.train

    def wrong(self, *arguments, **options):
        results = train(self, *arguments, **options)
        self._step_index = self._inputs.step_index.clone()
        self._inputs = self._inputs._replace(step_index=self._step_index)
        return results

    with patch.object(Stack, "train", wrong):
        yield


@contextmanager
def branches_that_nobody_waits_for():
    def wrong(self, streams, works):
        ambient = torch.cuda.current_stream()
        results = []
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
        ambient = torch.cuda.current_stream()
        results = []
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

    return patch.object(augment, "_per_channel", wrong)


def numbers_copied_in_every_step():
    def wrong(values, dtype, device):
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

    return patch.object(augment, "_per_channel", wrong)


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
SYMPTOMS = {  # how each fault shows itself
    learning_rate_of_the_first_round: "other bits",
    number_of_the_step_from_python: "a CUDA graph of the step gave other numbers",
    clients_in_new_tensors: FREED,
    sums_in_the_memory_of_a_graph: FREED,
    step_number_in_a_new_tensor: FREED,
    branches_that_nobody_waits_for: "a stream does not wait",
    branches_that_do_not_wait: "a stream does not wait",
    numbers_on_the_host: OTHER_DEVICE,
    numbers_copied_in_every_step: NOT_CAPTURED,
    list_of_numbers_in_a_loss: NOT_CAPTURED,
    value_read_in_a_loss: NOT_CAPTURED,
    tensor_of_the_host_in_a_loss: OTHER_DEVICE,
}


@pytest.mark.parametrize("name", [fault.__name__ for fault in SYMPTOMS])
@on_fake_cuda
def test_a_planted_fault_is_found(name):
    fault = globals()[name]
    way = "branches:4" if name.startswith("branches") else "4"
    options = {"clients_per_chunk": way, "lr_decay": 0.5, "local_epochs": 1}

    with early_captures():
        right_state = run_on_cpu(FEDAVG, **options)
        with fault():
            try:
                run = run_on_fake_cuda(FEDAVG, **options)
            except RuntimeError as error:
                symptom = str(error)
            else:
                bits = "other bits" if toy.distance(run.state, right_state) else "the same bits"
                symptom = ", ".join(run.fed.engine.notes) or bits
    assert re.search(SYMPTOMS[fault], symptom), symptom


# The rules of the device


def captured(pool, work):
    graph = Graph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
        work()
    return graph


@on_fake_cuda
def test_a_capture_does_nothing_and_a_replay_keeps_only_older_memory():
    """Memory that was allocated in the capture holds NaN after the replay."""
    with FakeCuda.running() as device:
        x = torch.ones(3, device="cuda")
        new_tensors = []
        graph = captured(Pool(), lambda: new_tensors.append(x.add_(1) * 2))
        assert x.tolist() == [1, 1, 1]

        graph.replay()
        assert x.tolist() == [2, 2, 2]
        (new_tensor,) = new_tensors
        assert new_tensor.isnan().all()
        assert device.captures == 1
        assert device.replays == 1


@on_fake_cuda
def test_a_number_of_the_host_stays_as_it_was_in_the_capture():
    with FakeCuda.running():
        x = torch.ones(3, device="cuda")
        number = torch.tensor(2.0)
        graph = captured(Pool(), lambda: x.mul_(number))
        number.fill_(5)
        graph.replay()
        assert x.tolist() == [2, 2, 2]


@on_fake_cuda
def test_a_pool_takes_no_graph_after_a_failed_capture_or_its_last_graph():
    with FakeCuda.running() as device:
        x = torch.ones(3, device="cuda")

        failed_pool = Pool()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captured(failed_pool, lambda: x.sum().item())
        torch.cuda.set_stream(device.races.main)
        with pytest.raises(RuntimeError, match="already recording"):
            captured(failed_pool, lambda: x.add_(1))

        pool_without_graphs = Pool()
        graph = captured(pool_without_graphs, lambda: x.add_(1))
        captured(pool_without_graphs, lambda: x.add_(1))
        del graph
        with pytest.raises(RuntimeError, match="use_count > 0"):
            captured(pool_without_graphs, lambda: x.add_(1))


@on_fake_cuda
def test_a_capture_waits_for_all_branches():
    with FakeCuda.running():
        x = torch.ones(3, device="cuda")
        branch = torch.cuda.Stream()

        def unjoined():
            branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(branch):
                x.add_(1)

        with pytest.raises(RuntimeError, match="previous error"):
            captured(Pool(), unjoined)
        with pytest.raises(RaceError), torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)


@on_fake_cuda
def test_what_python_waits_for_is_counted_and_what_it_need_not_wait_for_is_not():
    host = torch.arange(4.0)
    with FakeCuda.running() as device:
        x = host.pin_memory().to("cuda", non_blocking=True)
        factor = torch.full((4,), 2.0, device="cuda")
        index = torch.tensor([0, 2]).pin_memory().to("cuda", non_blocking=True)
        product = (x * factor)[index]
        assert device.waits.total() == 0
        assert product.tolist() == [0, 4]  # the first wait
        waits = [
            lambda: host.to("cuda"),
            lambda: host.to("cuda", non_blocking=True),
            lambda: torch.tensor(1.0, device="cuda"),
            lambda: x.cpu(),
            lambda: x.sum().item(),
            lambda: x[x > 0],
            lambda: torch.cuda.synchronize(),
        ]
        for count, wait in enumerate(waits, start=2):
            wait()
            assert device.waits.total() == count

        with pytest.raises(RuntimeError, match="read too early"):
            x.to("cpu", non_blocking=True)


@on_fake_cuda
def test_the_fused_step_of_the_device_is_that_of_pytorch():
    draws = torch.Generator().manual_seed(0)

    def random_tensors():
        return [torch.randn(5, generator=draws), torch.randn(2, 3, generator=draws)]

    def on_cuda(tensors):
        return [tensor.to("cuda") for tensor in tensors]

    def to_host(tensors):
        return [tensor.cpu() for tensor in tensors]

    for momentum, decay in ((0.9, 0.1), (0.9, 0.0), (0.0, 0.1)):
        params = random_tensors()
        grads = random_tensors()
        momenta = random_tensors() if momentum else []
        options = {
            "weight_decay": decay,
            "momentum": momentum,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            "is_first_step": False,
        }
        with FakeCuda.running():
            cuda_params = on_cuda(params)
            cuda_grads = on_cuda(grads)
            cuda_momenta = on_cuda(momenta)
            lr = torch.full((), 0.5, device="cuda")
            stand_still = torch.ones((), device="cuda")

            torch._fused_sgd_(cuda_params, cuda_grads, cuda_momenta, lr=lr, found_inf=stand_still, **options)
            assert all(map(torch.equal, to_host(cuda_params), params))

            torch._fused_sgd_(cuda_params, cuda_grads, cuda_momenta, lr=lr, found_inf=stand_still - 1, **options)
            params_after = to_host(cuda_params)
            grads_after = to_host(cuda_grads)
            momenta_after = to_host(cuda_momenta)

            vector_grad, matrix_grad = cuda_grads
            other_strides = [vector_grad, matrix_grad.T.contiguous().T]
            with pytest.raises(RuntimeError, match="strides"):
                torch._fused_sgd_(cuda_params, other_strides, cuda_momenta, lr=lr, **options)
            with pytest.raises(RuntimeError, match="scalar type"):
                torch._fused_sgd_(cuda_params, cuda_grads, cuda_momenta, lr=lr.double(), **options)

        torch._fused_sgd_(params, grads, momenta, lr=torch.tensor(0.5), **options)
        torch.testing.assert_close(params_after, params)
        torch.testing.assert_close(grads_after, grads)
        torch.testing.assert_close(momenta_after, momenta)


@on_fake_cuda
def test_autocast_multiplies_in_half_precision():
    with FakeCuda.running():
        x = torch.ones(2, 3, device="cuda")
        weight = torch.ones(4, 3, device="cuda")
        with torch.autocast(x.device.type, torch.bfloat16):
            assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert torch.nn.functional.linear(x, weight).dtype == torch.float32


@on_fake_cuda
def test_draws_are_noticed():
    with FakeCuda.running():
        before = torch.cuda.get_rng_state()
        torch.rand(3, device="cuda")
        assert not torch.equal(torch.cuda.get_rng_state(), before)


def calls_that_cannot_be_repeated():
    """Returns calls on images [N, C, H, W] of the device, each by the operation that gives other bits the next time."""
    aten = torch.ops.aten

    def gradient(function):
        return lambda x: torch.autograd.grad(function(x).sum(), x)

    def labels_of(x):
        return torch.zeros(len(x), *x.shape[2:], dtype=torch.int64, device=x.device)

    def grid_of(x):
        return torch.zeros(len(x), 5, 5, 2, device=x.device)

    def index_of(x):
        return torch.zeros_like(x, dtype=torch.int64)

    return {
        aten.histc: lambda x: x.histc(4),
        aten.kthvalue: lambda x: x.kthvalue(2),
        aten.median: lambda x: x.median(0),
        aten.put_: lambda x: x.detach().clone().put_(index_of(x), x.detach()),
        aten.scatter_reduce: lambda x: x.scatter_reduce(0, index_of(x), x, "prod"),
        aten.scatter_reduce_: lambda x: x.detach().clone().scatter_reduce_(0, index_of(x), x.detach(), "prod"),
        aten._adaptive_avg_pool2d_backward: gradient(lambda x: F.adaptive_avg_pool2d(x, 2)),
        aten.adaptive_max_pool2d_backward: gradient(lambda x: F.adaptive_max_pool2d(x, 2)),
        aten.grid_sampler_2d_backward: gradient(lambda x: F.grid_sample(x, grid_of(x), align_corners=False)),
        aten.nll_loss2d_forward: lambda x: F.cross_entropy(x, labels_of(x)),
        aten.reflection_pad2d_backward: gradient(lambda x: F.pad(x, (1, 1, 1, 1), "reflect")),
        aten.replication_pad2d_backward: gradient(lambda x: F.pad(x, (1, 1, 1, 1), "replicate")),
        aten.upsample_bilinear2d_backward: gradient(lambda x: F.interpolate(x, 5, mode="bilinear")),
        aten.upsample_bicubic2d_backward: gradient(lambda x: F.interpolate(x, 5, mode="bicubic")),
        aten.upsample_linear1d_backward: gradient(lambda x: F.interpolate(x[0], 5, mode="linear")),
    }


@on_fake_cuda
def test_every_operation_that_cannot_be_repeated_is_noticed_whatever_tensors_of_integers_come_with_it():
    calls = calls_that_cannot_be_repeated()
    assert calls.keys() == UNREPEATABLE
    for operation, call in calls.items():
        with FakeCuda.running() as device:
            call(torch.rand(2, 3, 4, 2, device="cuda", requires_grad=True))
            assert list(device.unrepeatable) == [f"{operation} in the test"]


@on_fake_cuda
def test_a_method_with_an_operation_that_cannot_be_repeated_is_refused():
    def with_bins(value, batch):
        return value + 0 * batch.y.double().histc(2).sum()

    with in_the_loss(with_bins), pytest.raises(AssertionError, match="histc in"):
        run_on_fake_cuda(FEDAVG, rounds=1, graphs=False, clients_per_chunk="1")


@on_fake_cuda
def test_no_device_is_left_after_one_has_ended():
    with FakeCuda.running():
        x = torch.ones(3, device="cuda")
    with pytest.raises(AttributeError):
        x.add(1)
