"""A run's folder: records, checkpoints, and law 7, resume is invisible."""

import dataclasses
import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import fedcli
from fedcli.errors import NonFiniteLoss
from fedcli.registry import find_method, find_protocol, methods
from fedcli.runs import checkpoints, resume, rounds, run_folder
from fedcli.runs.machine import machine_settings
from fedcli.runs.origins import NO_VALIDATION, recorded_origins
from fedcli.runs.record import params_hash, read_record, summarise, write_record
from fedcli.runs.resolve import default_dataset, resolve
from fedcli.runs.settings_text import reductions
from tests.first_rounds import limit_memory
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.run_parts import reproducible_parts
from tests.slow import parameters_of
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)


@pytest.mark.parametrize("method", parameters_of(methods()))
def test_law_7_resume_is_invisible(method, tmp_path):
    chosen = find_method(method)
    run_options = {**SHORT_RUN, "dataset": default_dataset(chosen), "rounds": 3, "backbone": "cnn-small"}
    if chosen.uses_public_data:
        run_options |= {"public_examples": 12, "public_batch_size": 5}
    whole = fedcli.run(method, out=tmp_path / "whole", **run_options)
    assert whole.record["status"] == "finished"

    folder = tmp_path / "killed"
    with pytest.raises(Stop):
        fedcli.run(method, out=folder, progress=StopAfter(1), **run_options, state_memory="0")
    with pytest.raises(Stop):
        resume.resume(folder, progress=StopAfter(1))
    again = resume.resume(folder)

    again.record["config"]["state_memory"] = None  # where states were kept does not show
    assert reproducible_parts(again.record) == reproducible_parts(whole.record)
    assert again.record["resumed"] == [1, 2]


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch):
    """A run that was killed before the first one goes on from the beginning."""
    # At its own pace a run then writes a checkpoint after the first round alone.
    monkeypatch.setattr(checkpoints, "LARGEST_TIME_SHARE", 1e-9)
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **SHORT_RUN)
    rounds_of_checkpoint = {2: 2, 4: 0, "auto": 1}  # before the fourth round
    for every, earlier in rounds_of_checkpoint.items():
        folder = tmp_path / str(every)
        with pytest.raises(Stop):
            fedcli.run("fedavg", out=folder, progress=StopAfter(3), **{**SHORT_RUN, "checkpoint_every": every})
        assert len(read_record(folder)["rounds"]) == 3

        again = resume.resume(folder)
        assert again.record["resumed"] == [earlier]
        assert reproducible_parts(again.record)["rounds"] == reproducible_parts(whole.record)["rounds"]
        assert again.record["summary"] == whole.record["summary"]
        assert again.record["config"]["checkpoint_every"] == (None if every == "auto" else every)


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int


class LineTracer:
    """Counts in a block how often each line of the loop of rounds is passed; may interrupt the block at a line.

    Attributes:
        times_passed: How often, by line.
    """

    FILES = (rounds.__file__, run_folder.__file__, checkpoints.__file__)

    def __init__(self, interrupted_line=None):
        self.interrupted_line = interrupted_line  # when it is passed for the second time
        self.times_passed = Counter()

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        """The trace function of Python's debuggers, see `sys.settrace`."""
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line":
            line = Line(frame.f_code.co_filename, frame.f_lineno)
            self.times_passed[line] += 1
            if line == self.interrupted_line and self.times_passed[line] == 2:
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.slow
def test_a_run_interrupted_before_any_line_of_its_loop_ends_in_the_same_bits(tmp_path):
    """Control-C comes between any two lines; state and rounds must not fall apart in the checkpoint that it writes.

    The run that is interrupted goes on to the next line, and so on.
    """
    options = {**SHORT_RUN, "train_examples": 40, "backbone": "cnn-small", "rounds": 100, "checkpoint_every": 100}
    with LineTracer() as tracer:
        record = fedcli.run("fedavg", out=tmp_path / "whole", **options).record
    whole = reproducible_parts(record)
    lines_of_loop = [line for line, times in tracer.times_passed.items() if times >= 99]
    assert len(lines_of_loop) > 20

    folder = tmp_path / "run"
    for line in lines_of_loop:
        with pytest.raises(KeyboardInterrupt), LineTracer(interrupted_line=line):
            fedcli.run("fedavg", out=folder, continue_=True, **options)
        terms = [entry["terms"] for entry in read_record(folder)["rounds"]]
        expected = [entry["terms"] for entry in whole["rounds"]]
        assert terms == expected[: len(terms)], line
    assert reproducible_parts(resume.resume(folder).record) == whole


def test_the_record_says_what_was_run(tmp_path):
    run = fedcli.run("fedfm", out=tmp_path / "run", **{**SHORT_RUN, "start_round": 1, "lr": 0.02})
    record = run.record
    assert read_record(run.path) == json.loads(json.dumps(record))
    assert record["schema"] == 1
    assert record["seed"] == 0
    assert {"rounds 4 of 20", "training images 120 of 1,438"} < set(reductions(record).values())
    assert sum(record["partition"]["sizes"]) == 120

    for entry in record["rounds"]:
        assert set(entry["terms"]) == {"cross_entropy", "matching"}
        assert set(entry["seconds"]) == {"data", "train", "aggregate", "evaluate"}

    summary = record["summary"]
    best = max(record["rounds"], key=lambda entry: entry["validation_accuracy"])
    assert summary["params_sha256"] == params_hash(run.state.params)
    assert summary["last"] == record["rounds"][-1]["test_accuracy"]
    assert summary["selected"] == best["test_accuracy"]

    anchors = 10 * 64
    floats = record["model"]["parameters"] + anchors
    assert record["cost"] == {
        "floats_down": floats,
        "floats_up": floats,
        "memory_floats": floats,
        "buffer_floats": 0,
    }


def test_a_data_sets_own_options_go_before_the_protocols(monkeypatch):
    method = find_method("fedfm")
    protocol = find_protocol("fedfm:digits", method)
    tuned = {"fedfm": {"match_weight": 7.0}, "moon": {"temperature": 3.0}}
    setting = dataclasses.replace(protocol.datasets["digits"], method_options=tuned)
    with_tuned = dataclasses.replace(protocol, datasets={**protocol.datasets, "digits": setting})
    monkeypatch.setattr("fedcli.runs.resolve.find_protocol", lambda *_: with_tuned)

    on_digits = resolve(method, {"protocol": protocol.name, "dataset": "digits"})
    assert on_digits.method_config.match_weight == 7.0
    assert on_digits.origins["match_weight"].text == "protocol fedfm:digits, digits"
    assert on_digits.method_config.start_round == 5
    assert on_digits.origins["start_round"].text == "protocol fedfm:digits"

    on_domains = resolve(method, {"protocol": protocol.name, "dataset": "digit-domains"})
    assert on_domains.method_config.match_weight == 5.0


def test_evaluation_is_every_other_round_and_after_the_last(tmp_path):
    """The last one is the headline of a run without a validation part."""
    options = {**SHORT_RUN, "rounds": 5, "eval_every": 3, "validation": 0.0}
    record = fedcli.run("fedavg", out=tmp_path / "run", **options).record
    is_tested = [entry["test_accuracy"] is not None for entry in record["rounds"]]
    assert is_tested == [False, False, True, False, True]
    assert record["summary"]["selection"] == "last"
    assert record["origin"]["selection"] == "no validation part"
    assert recorded_origins(record["origin"])["selection"] == NO_VALIDATION
    assert record["summary"]["selected"] == record["summary"]["last"]
    assert {entry["validation_accuracy"] for entry in record["rounds"]} == {None}


def test_resume_refuses_what_is_not_the_same_run(tmp_path):
    run = fedcli.run("fedavg", out=tmp_path / "run", **SHORT_RUN)
    with raises_user_error("has finished all of its 4 rounds; a run cannot be lengthened; train"):
        resume.resume(run.path)

    # A method of fedcli is known by its numerics, also where the words of its file have changed.
    numerics = {**run.record["numerics"], "method": 0}
    write_record(run.path, {**run.record, "status": "interrupted", "numerics": numerics})
    with raises_user_error("has changed since"):
        resume.resume(run.path)
    again = resume.resume(run.path, changed_method=True)
    (change,) = again.record["changed"]
    assert change["round"] == 4
    assert change["what"] == "the arithmetic of fedcli"


ENTRIES = [
    {"round": 0, "test_accuracy": 0.5, "validation_accuracy": 0.7},
    {"round": 1, "test_accuracy": None, "validation_accuracy": None},
    {"round": 2, "test_accuracy": 0.9, "validation_accuracy": 0.6},
    {"round": 3, "test_accuracy": 0.6, "validation_accuracy": 0.7},
    {"round": 4, "test_accuracy": 0.3, "validation_accuracy": 0.1},
]


@pytest.mark.parametrize(
    ("selection", "accuracy", "selected_round"),
    [("best-validation", 0.5, 0), ("last", 0.3, 4), ("mean-last-3", 0.6, 4), ("best-test", 0.9, 2)],
)
def test_the_headline_follows_the_protocols_rule(selection, accuracy, selected_round):
    summary = summarise(ENTRIES, selection)
    assert summary["selected"] == pytest.approx(accuracy)
    assert summary["selected_round"] == selected_round
    assert summary["last"] == 0.3
    assert summary["rounds"] == 5


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16", "float64"])
def test_every_precision_runs(precision, tmp_path, two_threads):
    run = fedcli.run("fedfm", out=tmp_path / "run", **{**SHORT_RUN, "rounds": 1, "precision": precision})
    assert run.record["hardware"]["threads"] == 1  # of the run, whose network is small
    dtype = torch.float64 if precision == "float64" else torch.float32
    assert {value.dtype for value in run.state.params.values()} == {dtype}


@pytest.mark.parametrize(
    ("device", "precision", "parameters", "together", "threads"),
    [
        ("cpu", "tf32", 99_999, 1, 1),
        ("cpu", "float32", 100_000, 1, 2),
        ("cpu", "float32", 99_999, 2, 2),
        ("cuda", "bf16", 99_999, 1, 2),
    ],
)
def test_threads_determinism_and_tf32_are_set_by_the_machine(
    device, precision, parameters, together, threads, two_threads, monkeypatch
):
    """A small network alone on the CPU has one thread.

    On CUDA operations are deterministic, and TF32 is asked for.
    """
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fed = SimpleNamespace(
        config=SimpleNamespace(precision=precision),
        sizes=SimpleNamespace(parameters=parameters),
        engine=SimpleNamespace(clients_per_chunk=together, notes=[], runner=SimpleNamespace(use_processes=nullcontext)),
        device=torch.device(device),
    )

    def settings():
        return {
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            "fills new memory": torch.utils.deterministic.fill_uninitialized_memory,
            "tf32 in products": torch.backends.cuda.matmul.allow_tf32,
            "tf32 in convolutions": torch.backends.cudnn.allow_tf32,
        }

    is_cuda = device == "cuda"
    before = settings()
    with machine_settings(fed):
        assert settings() == {
            "threads": threads,
            "deterministic": is_cuda,
            "only warns": is_cuda,
            "fills new memory": not is_cuda,
            "tf32 in products": precision == "tf32",
            "tf32 in convolutions": precision == "tf32",
        }
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_cuda else None)
    assert settings() == before
    assert before["threads"] == 2
    assert not before["deterministic"]
    assert not before["only warns"]
    assert before["fills new memory"]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_subnormal_numbers_are_0_within_a_run_only(tmp_path):
    """They are 0 in the run and its threads, and not afterwards."""

    def small_number():
        return float(torch.tensor(1e-30) * 1e-12)

    numbers_in_runs = []

    def look(*arguments):
        numbers_in_runs.append(small_number())
        with ThreadPoolExecutor(1) as pool:
            numbers_in_runs.append(pool.submit(small_number).result())

    stops = StopAfter(1)
    stops.start = look
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path / "run", progress=stops, **{**SHORT_RUN, "rounds": 2})
    assert small_number() > 0

    goes_on = rounds.Listener()
    goes_on.start = look
    record = resume.resume(tmp_path / "run", progress=goes_on).record
    assert small_number() > 0

    assert numbers_in_runs == [0, 0, 0, 0]
    assert record["machine"]["denormals"] == "0 in a run"


def test_a_chunk_that_did_not_fit_stays_small_after_a_resume(tmp_path, monkeypatch):
    """The record has the size of the chunk."""
    limit_memory(monkeypatch, 2)
    options = {**SHORT_RUN, "cohort_size": 4, "clients_per_chunk": "branches:4"}
    listener = StopAfter(2)
    notes = []
    listener.note = notes.append
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path / "run", progress=listener, **options)
    engine = read_record(tmp_path / "run")["engine"]
    text = "out of memory with 4 clients together; 2 from here on"
    assert notes == [text]
    assert engine["notes"] == [{"round": 0, "text": text}]
    assert engine["clients_per_chunk"] == 2
    assert engine["way"] == "branches"
    assert engine["chosen"] is None

    again = resume.resume(tmp_path / "run").record
    assert again["engine"] == engine
    assert again["config"]["clients_per_chunk"] == "branches:4"
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **{**options, "clients_per_chunk": "branches:2"}).record
    assert again["summary"] == whole["summary"]


@pytest.mark.parametrize(
    ("method", "option", "tensor"),
    [("scaffold", {"lr": 1e-300}, "clients/"), ("fedgen", {"generator_lr": 1e30}, "gen")],
)
def test_a_state_that_is_not_finite_is_diverged(method, option, tensor, tmp_path):
    with pytest.raises(NonFiniteLoss, match=f"'{tensor}.*' of the state is not finite in round 1"):
        fedcli.run(method, out=tmp_path / "run", **{**SHORT_RUN, "rounds": 2, **option})
    record = read_record(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["error"].startswith("NonFiniteLoss: ")


@pytest.mark.parametrize(
    ("number", "every", "seconds", "since", "is_due"),
    [
        # every 4 rounds, and after the last of 10
        (3, 4, 9, 0, True),
        (4, 4, 0, 1e9, False),
        (9, 4, 9, 0, True),
        # 0.5 of 10 seconds
        (0, None, 0, 0, True),
        (4, None, 0.5, 9.4, False),
        (4, None, 0.5, 9.6, True),
        # and not 1,140 s
        (4, None, 60, 599, False),
        (4, None, 60, 600, True),
        (9, None, 60, 0, True),
    ],
)
def test_checkpoints_take_a_twentieth_of_the_time_and_come_every_ten_minutes(number, every, seconds, since, is_due):
    assert checkpoints.is_due(number, every, 10, seconds, since) == is_due
