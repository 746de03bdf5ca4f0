"""Networks whose buffers change, or change places."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import fedcli
from fedcli.data import datasets
from fedcli.errors import UserError
from tests.tiny_runs import TINY

NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, channels, size, classes):
        super().__init__()
        self.first = nn.Linear(channels * size * size, 12)
        self.last = nn.Linear(12, classes)
        self.register_buffer("kept", torch.ones(12), persistent=PERSISTENT)
        self.register_buffer("other", torch.ones(12), persistent=True)
        MORE

    def forward(self, x):
        x = self.first(x.flatten(1))
        if self.training:
            CHANGE
        x = torch.tanh(x / self.kept) + 0.1 * self.other
        return BEHIND
"""
CHANGES = (
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
MORES = (
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
BEHINDS = ("self.last(x)", "self.last(x)", "self.last(F.dropout(x, 0.1, self.training))", "self.last(x).clamp(-99, 99)")


def swap_buffers(number: int) -> str:
    """A network whose buffers change or change places is refused in a line, or its loaded models are as recorded."""
    draw = random.Random(number)
    parts = {
        "PERSISTENT": str(draw.random() < 0.5),
        "MORE": draw.choice(MORES),
        "CHANGE": draw.choice(CHANGES),
        "BEHIND": draw.choice(BEHINDS),
    }
    text = NETWORK
    for name, part in parts.items():
        text = text.replace(name, part)
    with TemporaryDirectory() as parent:
        file = Path(parent, "net.py")
        file.write_text(text)
        options = {**TINY, "rounds": 1, "backbone": f"{file}:Net", "clients_per_chunk": draw.choice(("1", "2"))}
        try:
            run = fedcli.run("fedavg", out=Path(parent, "run"), **options)
        except UserError as error:
            is_clean = "\n" not in str(error) and not Path(parent, "run").exists()
            return "" if is_clean else f"{parts}: refused late or in several lines: {error}"
        data = datasets.load("digits")
        model = fedcli.load(run.path, method=file).model()
        hits = model(data.x_test / 255).argmax(1) == data.y_test
        accuracy = hits.double().mean().item()
        recorded = run.record["summary"]["selected"]
        return "" if accuracy == recorded else f"{parts}: {accuracy} when it is loaded, recorded {recorded}"
