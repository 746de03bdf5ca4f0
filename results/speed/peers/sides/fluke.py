"""fluke: its FedAVG."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from networks import make_network
from torch import nn

from sides.clients import load_client_images, load_initial_model
from sides.job import NUM_CLASSES, Job, Outcome, RoundClock


class Observer:
    """What fluke tells of a run: here when a round ends, and the accuracy of a round that is tested.

    Attributes:
        clock: Of the rounds.
        accuracies: Of every round that has ended; None of one that was not tested.
    """

    def __init__(self) -> None:
        self.clock = RoundClock()
        self.accuracies: list[float | None] = []

    def end_round(self, round: int) -> None:
        """Is called as a round ends."""
        self.clock.end_round()

    def server_evaluation(self, round: int, eval_type: str, evals: Mapping[str, float], **rest: Any) -> None:
        """Is called after a round, whether it was tested or not, and once more as the algorithm is finalised."""
        self.accuracies.append(evals.get("accuracy"))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None  # for whatever else an observer is told


def run(job: Job) -> Outcome:
    """Runs rounds by fluke's FedAVG; the last round's model is tested on the test images of all clients."""
    set_up_environment(job)
    clients = make_clients(job)
    network = make_network(job.training.backbone)
    load_initial_model(network, job.folder)
    server = Server(network, make_test_loader(job), clients, weighted=True)
    names = DDict(client=DDict(), server=DDict(), model="network")
    algorithm = FedAVG(len(clients), None, names, clients=clients, server=server)
    observer = Observer()
    algorithm.attach(observer)
    algorithm.run(job.rounds, job.training.share_of_clients, finalize=False)
    accuracy = float(observer.accuracies[job.rounds - 1])
    return Outcome(observer.clock.seconds(), accuracy, f"fluke-fl {version('fluke-fl')}")


def set_up_environment(job: Job) -> None:
    """Tells fluke to run on the CPU, and to test the server's model after the last round."""
    environment = FlukeENV()
    environment.set_seed(job.training.seed)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_evaluator(ClassificationEval(eval_every=job.rounds, n_classes=NUM_CLASSES))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)


def make_clients(job: Job) -> list[Client]:
    """Makes fluke's clients, each with its images."""
    training = job.training
    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", lr=training.lr), scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1)
    )
    clients = []
    for index, images in enumerate(load_client_images(job.folder, "train")):
        loader = FastDataLoader(*images.tensors, num_labels=NUM_CLASSES, batch_size=training.batch_size, shuffle=True)
        client = Client(index, loader, None, optimizer, nn.CrossEntropyLoss(), local_epochs=training.local_epochs)
        clients.append(client)
    return clients


def make_test_loader(job: Job) -> FastDataLoader:
    """Makes the loader of all clients' test images."""
    images = []
    labels = []
    for client_tests in load_client_images(job.folder, "test"):
        images_of_client, labels_of_client = client_tests.tensors
        images.append(images_of_client)
        labels.append(labels_of_client)
    return FastDataLoader(torch.cat(images), torch.cat(labels), num_labels=NUM_CLASSES, batch_size=500)
