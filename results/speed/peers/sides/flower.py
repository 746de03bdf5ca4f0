"""Flower: its simulation on Ray with the strategy FedAvg; the client app is a plain PyTorch loop.

Flower's actors, which are processes of their own, import this module by its name.
"""

from typing import Any

import flwr
import ray
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import make_network
from torch import nn
from torch.utils.data import DataLoader

from sides.clients import load_client_images, load_initial_model
from sides.job import Job, Outcome, RoundClock, Training


class Client:
    """A client that trains the model that was sent."""

    def __init__(self, job: Job):
        self._job = job

    def train(self, message: Any, context: Any) -> Any:
        """Answers a message that has a model by the trained one."""
        training = self._job.training
        client = context.node_config["partition-id"]
        images = load_client_images(self._job.folder, "train")[client]
        network = make_network(training.backbone)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_epochs(network, images, training)
        arrays = ArrayRecord(network.state_dict())
        metrics = MetricRecord({"num-examples": len(images)})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def train_epochs(network: nn.Module, images: Any, training: Training) -> None:
    """Trains a network for the local epochs, as a user of PyTorch writes it."""
    loader = DataLoader(images, training.batch_size, shuffle=True, drop_last=training.drop_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=training.lr)
    criterion = nn.CrossEntropyLoss()
    network.train()
    for _ in range(training.local_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()


class TimedFedAvg(FedAvg):
    """FedAvg that notes when the clients of a round have answered."""

    def __init__(self, clock: RoundClock, **options: Any):
        super().__init__(**options)
        self._clock = clock

    def aggregate_train(self, *replies: Any) -> Any:
        """Is called once a round."""
        self._clock.end_round()
        return super().aggregate_train(*replies)


class Server:
    """A server that trains by FedAvg and tests nothing."""

    def __init__(self, job: Job):
        self.clock = RoundClock()
        self._job = job

    def serve(self, grid: Any, context: Any) -> None:
        """Trains all rounds."""
        training = self._job.training
        strategy = TimedFedAvg(
            self.clock,
            fraction_train=training.share_of_clients,
            fraction_evaluate=0.0,
            min_train_nodes=training.cohort_size,
            min_available_nodes=training.num_clients,
        )
        network = make_network(training.backbone)
        load_initial_model(network, self._job.folder)
        strategy.start(grid, ArrayRecord(network.state_dict()), self._job.rounds)


def run(job: Job) -> Outcome:
    """Runs rounds by Flower's simulation, with an actor for each core."""
    client_app = ClientApp()
    client_app.train()(Client(job).train)
    server = Server(job)
    server_app = ServerApp()
    server_app.main()(server.serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, job.training.num_clients, backend_config=resources)
    return Outcome(server.clock.seconds(), None, f"flwr {flwr.__version__}, ray {ray.__version__}")
