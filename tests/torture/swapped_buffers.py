"""Networks whose buffers change, or change places."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import fedcli
from fedcli.data import datasets
from tests.accuracies import accuracy
from tests.run_options import SHORT_RUN
from tests.torture.faults import attempt

NETWORK_TEMPLATE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, channels, size, classes):
        super().__init__()
        self.first = nn.Linear(channels * size * size, 12)
        self.last = nn.Linear(12, classes)
        self.register_buffer("kept", torch.ones(12), persistent=IS_PERSISTENT)
        self.register_buffer("other", torch.ones(12), persistent=True)
        LAST_LINE_OF_INIT

    def forward(self, x):
        x = self.first(x.flatten(1))
        if self.training:
            STEP_IN_TRAINING
        x = torch.tanh(x / self.kept) + 0.1 * self.other
        return OUTPUT
"""
STEPS_IN_TRAINING = (
    "self.kept.mul_(1.5)",
    "self.kept.copy_(self.kept + 1)",
    "self.kept = self.kept * 1.5",
    "self.kept.data = x.data[0]",
    "self.kept, self.other = self.other, self.kept",
    "self._buffers['kept'] = self.other.clone()",
    "pass",
    "self.first.bias.data.mul_(0.9)",
    "with torch.no_grad(): self.other.lerp_(x.mean(0), 0.1)",
    "self._buffers['kept'], self._buffers['other'] = self.other.mul_(1.5), self.kept",
)
LAST_LINES_OF_INIT = (
    "pass",
    "pass",
    "self.double()",
    "self.other = self.kept",
    "self.first.weight.register_hook(lambda g: 0 * g)",
    "self.t = nn.Parameter(torch.zeros(1))",
    "self.register_buffer('key', torch.tensor(3))",
    "self.first.register_forward_hook(lambda layer, given, output: output + 1)",
    "self.first.requires_grad_(False)",
)
OUTPUTS = ("self.last(x)", "self.last(x)", "self.last(F.dropout(x, 0.1, self.training))", "self.last(x).clamp(-99, 99)")


def draw_parts(draw: random.Random) -> dict[str, str]:
    """Draws the parts of the text of a network, by the words in capitals that they take the place of."""
    return {
        "IS_PERSISTENT": str(draw.random() < 0.5),
        "LAST_LINE_OF_INIT": draw.choice(LAST_LINES_OF_INIT),
        "STEP_IN_TRAINING": draw.choice(STEPS_IN_TRAINING),
        "OUTPUT": draw.choice(OUTPUTS),
    }


def network_of(parts: dict[str, str]) -> str:
    """Returns the text of a network with these parts."""
    text = NETWORK_TEMPLATE
    for place, part in parts.items():
        text = text.replace(place, part)
    return text


def swap_buffers(number: int) -> str | None:
    """A network whose buffers change or change places is refused in a line, or its loaded models are as recorded."""
    draw = random.Random(number)
    parts = draw_parts(draw)
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        file = Path(parent, "net.py")
        file.write_text(network_of(parts))
        options = {**SHORT_RUN, "rounds": 1, "backbone": f"{file}:Net", "clients_per_chunk": draw.choice(("1", "2"))}
        run, fault = attempt(lambda: fedcli.run("fedavg", out=folder, **options), str(parts))
        if fault is not None:
            return fault
        if run is None:
            return f"{parts}: refused late" if folder.exists() else None

        model = fedcli.load(run.path, method=file).model()
        data = datasets.load("digits")
        measured = accuracy(model, data.x_test, data.y_test)
        recorded = run.record["summary"]["selected"]
        if measured != recorded:
            return f"{parts}: {measured} when it is loaded, recorded {recorded}"
        return None
