"""The benchmark: both sides do the same work, and its numbers are what they say. No test looks at a time."""

import csv
import dataclasses
import json
import re
import sys
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from fedcli import registry
from fedcli.bench import floors, measure, rounds
from fedcli.cli import app as cli
from fedcli.core import backbones
from fedcli.data import datasets

TINY = rounds.Workload("tiny", "no-such-set", 1, 28, 4, 20, 2, 2, 8, "cnn-mcmahan", num_test=10)
TINY_RESNET = dataclasses.replace(TINY, channels=3, image_size=32, images_per_client=6, backbone="resnet18")
CPU = {"device": "cpu", "repeats": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Ceilings and workloads that are measured in no time, and an empty working folder."""
    monkeypatch.setattr(floors, "MATMUL_SIDES", {"cpu": (32,)})
    monkeypatch.setattr(floors, "COPY_BYTES", 2**12)
    monkeypatch.setattr(floors, "LASTING", 1e-6)
    monkeypatch.setattr(rounds, "PUBLIC_IMAGES", 20)
    floors.ceilings.cache_clear()
    for name in rounds.WORKLOADS:
        monkeypatch.setitem(rounds.WORKLOADS, name, dataclasses.replace(TINY, name=name))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


def sides(workload, **options):
    """Both sides of a workload."""
    case = rounds.prepare(workload, **{**CPU, **options})
    dataset, _ = rounds.load_images(workload, case.setup.run.seed)
    engine = rounds.EngineRounds(case.setup, dataset)
    return engine, rounds.PlainRounds(workload, dataset, engine.fed)


def fake_seconds(monkeypatch, values):
    """Work is done, but takes the times in `values`; returns the list of what was timed."""
    timed, left = [], iter(values)

    def seconds(work, device):
        work()
        timed.append(work)
        return next(left)

    monkeypatch.setattr(measure, "seconds_of", seconds)
    monkeypatch.setattr(measure, "ceilings", lambda device, precision, convolutions: floors.Ceilings(1e6, 1e3))
    return timed


# Workloads


@pytest.fixture
def workloads(monkeypatch):
    """The real ones."""
    monkeypatch.undo()
    return rounds.WORKLOADS


def test_the_workloads_are_those_of_the_docstring(workloads):
    sizes = {name: (w.samples, w.steps, w.num_clients * w.images_per_client) for name, w in workloads.items()}
    assert sizes == {
        "w1": (30_000, 10 * 5 * 10, 60_000),  # 600 images in batches of 64 are 10 steps
        "w2": (12_000, 20 * 60, 60_000),
        "w3": (400_000, 10 * 10 * 63, 40_000),
    }
    assert rounds.find_workload("w2") is rounds.find_workload("cnn-small-batches") is workloads["w2"]
    assert [workload.words for workload in workloads.values()] == ["cnn-five-epochs", "cnn-small-batches", "resnet18"]
    assert rounds.scaling_workloads()[0].local_epochs == 1


def test_both_networks_of_a_workload_have_the_same_number_of_parameters(workloads):
    counts = {}
    for name, workload in workloads.items():
        built = backbones.build(workload.backbone, workload.channels, workload.image_size, 10, 0)
        plain = rounds.plain_network(workload)
        own, other = ([value.shape for value in module.parameters()] for module in (built, plain))
        assert own == other
        counts[name] = sum(shape.numel() for shape in own)
    assert counts == {"w1": 582_026, "w2": 582_026, "w3": 11_181_642}


# Images


def test_real_images_are_taken_where_they_are_there(tmp_path):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (100, 28, 28), dtype=np.uint8)
    labels = np.arange(100) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    workload = dataclasses.replace(TINY, dataset="own")
    dataset, kind = rounds.load_images(workload, 0)
    assert (kind, dataset.x_train.shape, dataset.x_train.dtype) == ("random", (80, 1, 28, 28), torch.uint8)
    datasets.import_path("own", tmp_path / "own.npz")
    dataset, kind = rounds.load_images(workload, 0)
    assert kind == "real"
    known = {image.tobytes() for image in images}
    assert len(dataset.x_train) == 80  # of 100, as many as the clients hold
    assert {image.numpy().tobytes() for image in dataset.x_train} <= known


# Both sides do the same


@pytest.mark.parametrize("chunk", ["1", "2"])
def test_both_sides_take_the_same_steps_on_the_same_images(chunk, monkeypatch):
    engine_sizes, plain_sizes, steps, seen = [], [], [], []
    monkeypatch.setattr(rounds, "federation", partial(rounds.federation, on_samples=engine_sizes.append))
    engine, plain = sides(TINY, clients_per_chunk=chunk)
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *arguments: (steps.append(1), step(*arguments))[1])

    def watch(module, inputs, output):
        plain_sizes.append(len(inputs[0]))
        seen.extend(image.numpy().tobytes() for image in inputs[0])

    plain.model.register_forward_hook(watch)
    cohort = engine.fed.cohort(0).client_ids
    engine.round(0)
    plain.round(cohort)
    assert sum(engine_sizes) == sum(plain_sizes) == TINY.samples == 80
    assert len(steps) == len(plain_sizes) == TINY.steps == 12
    assert sorted(plain_sizes) == 4 * [4] + 8 * [8]
    if chunk == "1":
        assert sorted(engine_sizes) == sorted(plain_sizes)
    images = engine.fed.engine.gather(np.concatenate([engine.fed.training[client] for client in cohort]))[0]
    assert sorted(seen) == sorted(2 * [image.contiguous().numpy().tobytes() for image in images])


@pytest.mark.parametrize("workload", [TINY, TINY_RESNET], ids=["cnn", "resnet"])
def test_both_sides_end_with_the_same_model_where_the_order_of_samples_does_not_matter(workload):
    whole = dataclasses.replace(workload, batch_size=workload.images_per_client)
    engine, plain = sides(whole, precision="float64")
    trees = engine.state.params, engine.state.buffers
    names = [name for name in plain.state if "num_batches_tracked" not in name]
    parameters = [name for name, _ in plain.model.named_parameters()]
    ordered = parameters + [name for name in names if name not in parameters]
    for name, value in zip(ordered, [*trees[0].values(), *trees[1].values()], strict=True):
        plain.state[name].copy_(value)
    for number in range(2):
        engine.round(number)
        plain.round(engine.fed.cohort(number).client_ids)
    model = [*engine.state.params.values(), *engine.state.buffers.values()]
    for name, value in zip(ordered, model, strict=True):
        torch.testing.assert_close(plain.state[name], value, rtol=1e-7, atol=1e-9)
    assert "num_batches_tracked" in "".join(plain.state) or workload is TINY


def test_no_value_of_a_protocol_enters(monkeypatch):
    known = {name: each for name, each in registry.protocols().items() if "digits" in each.datasets}
    monkeypatch.setattr(registry, "protocols", lambda: known)
    for method in registry.methods().values():
        setup = rounds.prepare(TINY, method=method.name, **CPU).setup
        run = setup.run
        assert (run.lr, run.momentum, run.weight_decay, run.lr_decay, run.optimizer) == (0.01, 0.9, 0, 1, "sgd")
        assert (run.validation, run.drop_last, run.partition, setup.setting) == (0, False, "iid", None)
        assert (run.num_clients, run.cohort_size, run.local_epochs, run.batch_size) == (4, 2, 2, 8)
        assert setup.options == method.config()


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedmd", "fccl", "fedgen"])  # a method of each kind
def test_every_method_can_be_measured(name):
    result = measure.measure(rounds.prepare(dataclasses.replace(TINY, image_size=16), method=name, **CPU))
    assert result["method"] == name


def test_the_rounds_are_late_ones_of_a_run_and_each_is_run_once_after_the_warm_up(monkeypatch):
    numbers, cohorts = [], []
    run, plain_run = rounds.EngineRounds.round, rounds.PlainRounds.round
    monkeypatch.setattr(rounds.EngineRounds, "round", lambda self, n: (numbers.append(n), run(self, n)))
    monkeypatch.setattr(rounds.PlainRounds, "round", lambda self, ids: (cohorts.append(ids), plain_run(self, ids)))
    case = rounds.prepare(TINY, device="cpu", repeats=3)
    measure.measure(case)
    assert numbers == [1000, 1001, 1002, 1003]
    assert case.setup.run.rounds == 1004
    fed = sides(TINY)[0].fed
    assert [list(ids) for ids in cohorts] == [list(fed.cohort(number).client_ids) for number in numbers]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_numbers_too_small_for_their_exponent_are_0_for_both_sides_as_in_a_run(monkeypatch):
    seen, engine, plain = [], rounds.EngineRounds.round, rounds.PlainRounds.round

    def spy(name, round):
        return lambda self, what: (seen.append((name, sys.float_info.min / 2)), round(self, what))

    monkeypatch.setattr(rounds.EngineRounds, "round", spy("engine", engine))
    monkeypatch.setattr(rounds.PlainRounds, "round", spy("plain", plain))
    measure.measure(rounds.prepare(TINY, **CPU))
    assert seen == [("engine", 0), ("plain", 0)] * 2
    assert sys.float_info.min / 2 > 0


def test_the_plain_loop_takes_the_operations_that_pytorch_takes_by_default(monkeypatch):
    seen, loss = [], F.cross_entropy

    def spy(*arguments):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return loss(*arguments)

    engine, plain = sides(TINY)
    monkeypatch.setattr(rounds.F, "cross_entropy", spy)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in a run on CUDA
    try:
        plain.round(engine.fed.cohort(0).client_ids)
        assert set(seen) == {False}
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# The numbers


def test_flops_of_layers_by_hand():
    _, plain = sides(TINY)
    conv1 = 2 * 24 * 24 * 32 * 25  # multiply-adds count twice; the images need no gradient, so it is passed twice
    conv2 = 2 * 8 * 8 * 64 * 32 * 25
    linear = 2 * 1024 * 512 + 2 * 512 * 10
    assert plain.flops_per_sample() == 2 * conv1 + 3 * (conv2 + linear)
    assert plain.flops_per_sample(train=False) == conv1 + conv2 + linear


def test_the_convolutions_of_a_step_by_hand():
    _, plain = sides(TINY)
    once = {"stride": (1, 1), "padding": (0, 0), "groups": 1}
    assert plain.convolutions() == (
        rounds.Convolution((8, 1, 28, 28), (32, 1, 5, 5), **once),
        rounds.Convolution((8, 32, 12, 12), (64, 32, 5, 5), **once),
    )
    assert len(sides(TINY_RESNET)[1].convolutions()) == 11  # kinds, of 20 layers


def test_taps_that_meet_padding_only_are_no_work_that_has_to_be_done(monkeypatch):
    _, plain = sides(TINY_RESNET)
    live, kinds = plain.flops_per_sample(train=False), plain.convolutions()
    assert rounds.Convolution((6, 512, 1, 1), (512, 512, 1, 1), (1, 1), (0, 0), 1) in kinds
    monkeypatch.setattr(rounds, "use_live_taps", lambda *arguments: False)
    _, plain = sides(TINY_RESNET)
    assert plain.flops_per_sample(train=False) - live == 2 * 6_946_816  # one place in the image for each dead weight


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_rounds_of_a_protocols_own_run_are_timed_with_testing_and_say_what_all_take(method, monkeypatch):
    small = {"train_examples": 60, "num_clients": 3, "cohort_size": 2, "backbone": "cnn-small", "rounds": 40}
    setup = rounds.prepare_run(method, epochs=1, seed=1, device="cpu", batch_size=10, partition="iid", **small)
    assert (setup.run.dataset, setup.run.local_epochs) == ("cifar10", 1)
    numbers, run_round = [], rounds.EngineRounds.round
    monkeypatch.setattr(rounds.EngineRounds, "round", lambda own, n: numbers.append(n) or run_round(own, n))
    fake_seconds(monkeypatch, [9, 9, 3, 0.5, 4, 0.25, 5, 0.75])
    result = measure.measure_run(setup, 3)
    assert numbers == [36, 37, 38, 39]  # the last ones
    assert (result["seconds_per_round"], result["seconds_spread"]) == (4.25, [3.5, 5.75])
    assert (result["evaluation_seconds"], result["whole_seconds"]) == (0.5, 40 * 4.25)
    assert result["peak_bytes"] > 2**20
    text = measure.describe_run(result)
    assert "4.25 seconds a round (3.5-5.75), 0.5 of them testing; all 40 rounds take 2.83 minutes." in text


def test_a_method_among_the_workloads_is_its_own_run(monkeypatch):
    monkeypatch.setattr(measure, "measure_run", lambda setup, repeats, progress: {"method": setup.method.name})
    assert json.loads(done("fedprox", "--json")) == {"method": "fedprox"}


@pytest.mark.parametrize(("method", "models"), [(rounds.simplest_method(), [1, 1]), ("fedproto", [4, 4])])
def test_every_model_that_has_changed_is_tested(method, models, monkeypatch):
    engine, found = sides(TINY, method=method)[0], []
    for number in range(2):
        engine.round(number)
        engine.evaluate()
        found.append(engine.models_tested)
    assert found == models  # of two clients a round
    fake_seconds(monkeypatch, [1.0, 1.0, 1.0])
    result = measure.measure(rounds.prepare(TINY, method=method, **CPU))
    forward = sides(TINY)[1].flops_per_sample(train=False)
    assert result["evaluation_floor_seconds"] == pytest.approx(models[1] * 10 * forward / 1e6)


def test_ceilings_are_of_the_fastest_kind_of_work_with_one_or_all_threads(monkeypatch, two_threads):
    cost = {"matmul": {1: 2.0, 2: 2.0}, "conv2d": {1: 0.3, 2: 0.1}, "copy_": {1: 0.2, 2: 0.5}}  # seconds of a call

    def seconds(work, device):
        of_one, times, workers = work.args
        work()
        return cost[of_one.func.__name__][workers] * times

    monkeypatch.setattr(floors, "seconds_of", seconds)
    kind = rounds.Convolution((2, 3, 8, 8), (4, 3, 5, 5), (2, 2), (1, 1), 1)
    limits = floors.ceilings(torch.device("cpu"), "float64", (kind,))
    flops = 2 * (2 * 4 * 3 * 3) * (3 * 5 * 5)
    assert limits.flops == pytest.approx(2 * flops / 0.1)  # two threads, each as fast as one; 32^3 twice in 2 s is less
    assert limits.bandwidth == pytest.approx(2 * 2**12 / 0.2)  # by both together
    assert torch.get_num_threads() == 2
    assert floors.ceilings(torch.device("cpu"), "bf16", ()).flops == pytest.approx(2 * 2 * 32**3 / 2.0)


def test_times_are_medians_and_the_ratio_is_the_median_of_the_pairs(monkeypatch):
    timed = fake_seconds(monkeypatch, [1.0, 3.0, 0.5, 2.0, 2.0, 0.25, 4.0, 8.0, 0.125])
    result = measure.measure(rounds.prepare(TINY, device="cpu", repeats=3))
    names = [work.func.__qualname__ if isinstance(work, partial) else work.__qualname__ for work in timed]
    assert names == 3 * ["EngineRounds.round", "PlainRounds.round", "EngineRounds.evaluate"]
    assert (result["seconds_per_round"], result["seconds_spread"]) == (2.0, [1.0, 4.0])
    assert (result["plain_seconds_per_round"], result["plain_spread"]) == (3.0, [2.0, 8.0])
    assert result["ratio"] == median([3.0, 1.0, 2.0])  # of the medians it would be 1.5
    assert result["samples_per_second"] == 80 / 2.0
    assert result["evaluation_seconds"] == 0.25
    assert result["floor_seconds"] == max(result["arithmetic_floor_seconds"], result["memory_floor_seconds"])
    assert result["floor_share"] == result["floor_seconds"] / 2.0
    assert result["arithmetic_floor_seconds"] == pytest.approx(80 * sides(TINY)[1].flops_per_sample() / 1e6)
    assert result["memory_floor_seconds"] == pytest.approx(12 * 24 * 582_026 / 1e3)


def test_what_is_not_local_training_counts_as_data_and_server(monkeypatch):
    fake_seconds(monkeypatch, [10.0, 1.0, 1.0, 20.0, 1.0, 1.0, 30.0, 1.0, 1.0])
    training = {1000: 0.0, 1001: 6.0, 1002: 2.0, 1003: 29.0}

    def round(self, number):
        self.fed.start_round()
        self.fed.seconds["train"] = training[number]
        self.partition_seconds = 2.0

    monkeypatch.setattr(rounds.EngineRounds, "round", round)
    result = measure.measure(rounds.prepare(TINY, device="cpu", repeats=3))
    assert result["data_seconds_share"] == (2 + 4) / (2 + 20)  # the median of 4, 18 and 1


@pytest.mark.parametrize(
    ("precision", "item"), [("float32", 4), ("bf16", 4), ("float64", 8)]
)  # parameters stay float32 under bf16
def test_every_precision_is_measured_on_both_sides(precision, item, monkeypatch):
    fake_seconds(monkeypatch, [1.0, 1.0, 1.0])
    result = measure.measure(rounds.prepare(TINY, precision=precision, **CPU))
    assert result["precision"] == precision
    assert result["memory_floor_seconds"] == pytest.approx(12 * 6 * item * 582_026 / 1e3)
    _, plain = sides(TINY, precision=precision)
    outputs = []
    plain.model.register_forward_hook(lambda module, inputs, output: outputs.append(output.dtype))
    plain.round([0])
    assert set(outputs) == {{"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}[precision]}


def test_a_result_has_the_documented_keys_and_says_what_was_measured():
    result = measure.measure(rounds.prepare(TINY, clients_per_chunk="2", seed=3, **CPU))
    assert tuple(result) == measure.COLUMNS
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    said = [result[name] for name in ("workload", "engine", "device", "seed", "cohort_size", "threads", "torch")]
    assert said == ["tiny", "stacked x 2", "cpu", 3, 2, torch.get_num_threads(), torch.__version__]
    assert result["peak_bytes"] > 2**20


# The command


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)], prog_name="fedcli")


def done(*arguments):
    result = invoke(*arguments, "--device", "cpu", "--repeats", "1")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_workloads_the_two_short_ones_are_measured_into_a_table():
    speed, rest, machine = done().split("\n\n")
    for table, columns in zip((speed, rest), measure.TABLES, strict=True):
        lines = table.splitlines()
        assert [line.split()[0] for line in lines] == ["Workload", "w1", "w2"]
        assert re.split(" {2,}", lines[0].strip()) == list(columns)
    assert "looped" in speed.splitlines()[1]
    assert rest.splitlines()[1].strip().endswith("random")
    assert machine.startswith(f"{rounds.simplest_method()} on cpu (")
    assert f"threads: {torch.get_num_threads()}, torch {torch.__version__}, float32; times in seconds" in machine


def test_json_is_one_object_a_line_and_nothing_else():
    results = [json.loads(line) for line in done("w2", "w1", "--json").splitlines()]
    assert [result["workload"] for result in results] == ["w2", "w1"]
    assert all(tuple(result) == measure.COLUMNS for result in results)


def test_options_reach_the_measurement():
    options = ("--epochs", 1, "--precision", "float64", "--clients-per-chunk", 2, "--seed", 4, "--method", "fedfm")
    result = json.loads(done("w1", "--json", *options))
    said = [result[name] for name in ("local_epochs", "precision", "engine", "seed", "method", "device", "repeats")]
    assert said == [1, "float64", "stacked x 2", 4, "fedfm", "cpu", 1]


def test_csv_has_one_header_and_grows():
    first = json.loads(done("w1", "--json", "--csv", "deep/out.csv"))
    done("w1", "w2", "--csv", "deep/out.csv")
    with open("deep/out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["w1", "w1", "w2"]
    assert rows[0]["samples_per_second"] == str(first["samples_per_second"])
    assert json.loads(rows[0]["seconds_spread"]) == first["seconds_spread"]


def test_in_a_folder_the_files_are_named_after_device_and_version(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu130")
    hardware = {"cores": 3, "name": "NVIDIA H200 (MIG 1g.18gb)"}
    monkeypatch.setattr(measure, "environment", lambda device: {"hardware": hardware})
    names = [measure.result_file(tmp_path, torch.device(kind), ".csv").name for kind in ("cpu", "cuda")]
    assert names == ["cpu-3-cores-torch2.99.1.csv", "nvidia-h200-mig-1g-18gb-torch2.99.1.csv"]
    assert measure.result_file(tmp_path / "own", torch.device("cpu"), ".csv") == tmp_path / "own"


def test_scaling_is_measured_over_clients_and_batches(monkeypatch):
    monkeypatch.setattr(rounds, "SCALING_CLIENTS", (1, 2))
    monkeypatch.setattr(rounds, "SCALING_BATCHES", (4, 8))
    lines = done("w2", "--scaling", "--csv", "scaling.csv").splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["w2", "w1 K=1 B=8", "w1 K=2 B=8", "w1 K=2 B=4"]
    assert len(Path("scaling.csv").read_text().splitlines()) == 5


def test_what_was_measured_before_an_interruption_is_shown(monkeypatch):
    whole = measure.measure

    def interrupted(case, progress):
        if case.workload.name == "w2":
            raise KeyboardInterrupt
        return whole(case, progress)

    monkeypatch.setattr(measure, "measure", interrupted)
    result = invoke("w1", "w2", "--device", "cpu", "--repeats", "1", "--csv", "out.csv")
    assert result.exit_code == 130
    assert result.stdout.splitlines()[1].startswith("w1 ")
    assert len(Path("out.csv").read_text().splitlines()) == 2
