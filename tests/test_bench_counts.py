"""The counts of a joint step by `fedcli bench --count`."""

import json
from collections import Counter

import pytest

from fedcli.bench import estimate, joint_step, speed
from fedcli.bench.table import format_count
from fedcli.core.stacked import WAYS
from fedcli.errors import UserError
from tests.bench_parts import TINY_CNN, prepare_sides
from tests.commands import PROGRAM, error_of, invoke, output_of

pytestmark = pytest.mark.usefixtures("reduced_workloads")


@pytest.mark.parametrize("way", ["stacked", "branches"])
def test_what_a_joint_step_reads_and_computes_is_counted_as_by_hand(way):
    step = joint_step.count_step(TINY_CNN, way, "float32")
    row = step.as_dict()
    *_, plain = prepare_sides(TINY_CNN)
    clients, batch_size = 2, 8
    assert row["gflop"] * 1e9 == pytest.approx(clients * batch_size * estimate.count_flops_per_example(plain))
    values = 2 * 582_026
    nbytes = Counter()
    for operation in step.operations:
        nbytes[operation.name] += operation.bytes
    assert nbytes["_fused_sgd_"] == 5 * 4 * values  # parameters and momentum read and written, gradients read
    assert not any(nbytes[name] >= 3 * 4 * values for name in ("where", "add", "stack", "cat"))
    assert row["kernels"] <= 88
    assert row["gigabytes"] <= {"stacked": 0.067, "branches": 0.055}[way]


def test_counts_are_printed_for_workloads_and_nothing_is_measured(folder, monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    title, *lines = invoke("bench", "w1", "--count").stdout.splitlines()
    assert title.split()[:3] == ["Workload", "Mode", "Kernels"]
    assert [line.split()[:2] for line in lines] == [["w1", "stacked"], ["w1", "branches"]]

    _, line = invoke("bench", "w2", "--count", "--json").stdout.splitlines()
    row = json.loads(line)
    assert row["workload"] == "w2"
    assert row["mode"] == "branches x 2"
    assert row["precision"] == "float32"

    assert "unknown workload 'w9'" in error_of("bench", "w9", "--count")


@pytest.mark.parametrize("way", WAYS)
def test_a_count_knows_no_bf16(way):
    with pytest.raises(UserError, match=r"bf16 cannot be counted .* choose float32, float64 or tf32"):
        joint_step.count_step(TINY_CNN, way, "bf16")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["float32", "float64", "tf32"])
def test_a_count_models_the_time_of_float32_alone(way, precision):
    step = joint_step.count_step(TINY_CNN, way, precision)
    written = step.as_dict()
    assert written["kernels"] > 0
    assert ("modelled_seconds" in written) == ("Modelled ms" in format_count(step)) == (precision == "float32")


def test_each_option_of_bench_reaches_a_count_or_is_refused_beside_it(monkeypatch):
    steps = []
    count_step = joint_step.count_step

    def watched(workload, way, precision):
        steps.append(precision)
        return count_step(workload, way, precision)

    monkeypatch.setattr(joint_step, "count_step", watched)
    assert json.loads(output_of("bench", "w1", "--count", "--json", "--precision", "float64").splitlines()[0])
    assert set(steps) == {"float64"}

    read = {"workloads", "precision", "json", "count"}
    others = [option for option in PROGRAM.commands["bench"].params if option.name not in read]
    assert len(others) == 8
    for option in others:
        (flag,) = option.opts
        value = [] if option.is_flag else [option.default or 1]  # also the default, as it is typed
        fault = error_of("bench", "w1", "--count", flag, *value)
        assert fault.startswith(f"--count reads no other options than --precision and --json (got {flag}): ")
    assert len(steps) == 2
