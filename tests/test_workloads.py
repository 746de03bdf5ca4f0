"""The workloads of the benchmark as they are: their sizes and networks, and the kernels and bytes of a step."""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedcli.bench import joint_step, operation_counts, plain_loop, random_images, workloads
from fedcli.core import backbones
from fedcli.data.catalog import KNOWN
from tests.commands import output_of

ROOT = Path(__file__).parent.parent


class ImageShape(NamedTuple):
    """The shape of the images of a data set."""

    channels: int
    size: int  # height and width


class WorkloadSize(NamedTuple):
    """How much a workload trains."""

    parameters: int
    clients: int
    images: int
    epochs: int


SHAPES = {"fmnist": ImageShape(1, 28), "cifar10": ImageShape(3, 32)}


def test_the_workloads_have_these_sizes_and_one_network_on_both_sides():
    sizes = []
    for workload in workloads.WORKLOADS:
        image = SHAPES[workload.dataset]
        built = backbones.build(workload.backbone, image.channels, image.size, 10, 0)
        plain = plain_loop.build_plain_network(workload.backbone, image.channels, image.size)
        shapes = [value.shape for value in plain.parameters()]
        assert [value.shape for value in built.parameters()] == shapes
        parameters = sum(shape.numel() for shape in shapes)
        sizes.append(WorkloadSize(parameters, workload.num_clients, workload.train_examples, workload.local_epochs))
    assert sizes == [
        WorkloadSize(parameters=582_026, clients=100, images=60_000, epochs=5),
        WorkloadSize(parameters=582_026, clients=100, images=60_000, epochs=1),
        WorkloadSize(parameters=11_181_642, clients=10, images=40_000, epochs=10),
        WorkloadSize(parameters=21_840, clients=100, images=60_000, epochs=5),
    ]


def test_the_page_of_speed_and_the_help_say_what_the_workloads_are():
    page = (ROOT / "results" / "speed" / "README.md").read_text(encoding="utf-8")
    help_text = " ".join(output_of("bench", "--help").split())
    for workload in workloads.WORKLOADS:
        image = SHAPES[workload.dataset]
        plain = plain_loop.build_plain_network(workload.backbone, image.channels, image.size)
        parameters = sum(value.numel() for value in plain.parameters())
        network = workload.backbone.rpartition(":")[2]
        colour = "grey" if image.channels == 1 else "colour"
        images_of_client = workload.train_examples // workload.num_clients
        cells = [
            f"{parameters:,}",
            f"{KNOWN[workload.dataset].title}, {image.size} x {image.size}, {colour}",
            str(workload.num_clients),
            f"{images_of_client:,}",
            str(workload.cohort_size),
            str(workload.local_epochs),
            str(workload.batch_size),
        ]
        network_cell = rf"\[?`{network}`.*"
        line = rf"^\| {workload.name} \| {network_cell} \| {re.escape(' | '.join(cells))} \|$"
        assert re.search(line, page, re.MULTILINE), workload.name
        assert f"{workload.alias}, {workload.name}: " in help_text


def test_the_workloads_have_names_in_words_too():
    words = ["cnn-five-epochs", "cnn-small-batches", "resnet18", "small-network"]
    for workload, in_words in zip(workloads.WORKLOADS, words, strict=True):
        assert workloads.find_workload(in_words) is workloads.find_workload(workload.name) is workload
    assert workloads.find_workload("") is workloads.find_workload("w9") is None


def test_each_cohort_and_batch_of_scaling_changes_a_workload_by_these_alone():
    assert len(workloads.SCALING) == 10
    name = "w1 K=5 B=64"
    assert workloads.find_workload(name) == replace(workloads.W1, name=name, alias="", cohort_size=5, local_epochs=1)


@pytest.mark.parametrize("name", SHAPES)
def test_random_images_are_as_many_and_as_large_as_those_of_the_set(name):
    image_size = SHAPES[name].size
    drawn = getattr(random_images, name)()
    assert len(drawn["x_train"]) >= 50_000
    assert drawn["x_test"].shape[1:3] == (image_size, image_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "most_kernels", "most_gigabytes"),
    [
        ("w1", "stacked", 70, 0.9),
        ("w1", "branches", 352, 0.72),
        ("w2", "branches", 682, 0.55),
        ("w3", "stacked", 340, 6.0),
        ("w3", "branches", 1774, 5.8),
    ],
)
def test_a_joint_step_takes_few_kernels_and_bytes(name, way, most_kernels, most_gigabytes):
    """They decide the speed of a graph of many."""
    row = joint_step.count_step(workloads.find_workload(name), way, "float32").as_dict()
    assert row["kernels"] <= most_kernels
    assert row["gigabytes"] <= most_gigabytes


def test_a_list_of_tensors_takes_as_many_kernels_as_pytorch_cuts_it_into():
    few = [torch.zeros(9)] * 48
    many = [torch.zeros(9)] * 49
    large = [torch.zeros(320 * 65536 + 1, device="meta")]
    assert operation_counts.count_list_kernels(few) == 1
    assert operation_counts.count_list_kernels(many) == 2
    assert operation_counts.count_list_kernels(large) == 2
