"""Source texts of files with networks, as users write them."""

ONE_LAYER_NETWORK = """
from torch import nn
def tiny(channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""

NETWORK_TEMPLATE = """from torch import nn
class Net(nn.Module):
    def __init__(self, channels, image_size, num_classes):
        super().__init__()
        self.first = nn.Linear(image_size**2, 6)
        self.fc = nn.Linear(6, num_classes)
        LAYERS
    def forward(self, x):
        x = x.flatten(1)
        FORWARD
"""

# The last statement of `forward` for a network without further layers.
RETURN_LOGITS = "return self.fc(self.first(x))"

# A file of networks with dropout, attention, shared and frozen layers. Each is made by a function.
NETWORKS = """
import torch, torchvision
from torch import nn
from torch.nn import functional as F

class Transformer(nn.Module):
    def __init__(self, channels, size, classes, dropout=0.0, first=True, attention=None):
        super().__init__()
        self.patches = nn.Conv2d(channels, 8, 2, 2)
        self.first = first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=first)
        self.encoder = attention or nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        if self.first:
            x = self.encoder(x)
        else:
            x = self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))

def dropping(*shape):
    return Transformer(*shape, 0.1)

def batch_second(*shape):
    return Transformer(*shape, 0.1, False)

class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, 0.2, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=True)[0]

def weights(*shape):
    return Transformer(*shape, attention=MultiHead())

class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.twice = nn.Dropout(0.1)
        self.whole = nn.Dropout2d(0.1)

    def forward(self, x):
        x = self.twice(nn.Tanh()(self.layer(F.dropout(x, 0.1, self.training))))
        x = self.twice(F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 * self.training))
        return self.whole(x[:, :, :, None])[:, :, :, 0]

def functions(*shape):
    return Transformer(*shape, attention=Functions())

def torchvisions(channels, size, classes):
    network = torchvision.models.VisionTransformer(size, 2, 1, 2, 8, 16, 0.1, 0.1, classes)
    network.conv_proj = nn.Conv2d(channels, 8, 2, 2)
    nn.init.normal_(network.heads.head.weight, std=0.1)
    return network

def shared(channels, size, classes):
    layer = nn.Linear(8, 8)
    first = nn.Flatten(), nn.Linear(channels * size * size, 8)
    return nn.Sequential(*first, layer, nn.ReLU(), layer, nn.Linear(8, classes))

def in_place(channels, size, classes):
    first = nn.Flatten(), nn.Linear(channels * size * size, 8), nn.ReLU()
    return nn.Sequential(*first, nn.Dropout(0.2, True), nn.Linear(8, classes))

def compiled(channels, size, classes):
    first = torch.compile(nn.Conv2d(channels, 4, 3))
    network = nn.Sequential(first, nn.Hardswish(True), nn.Dropout(0.3, True), nn.Flatten(), nn.LazyLinear(classes))
    network[-2].compile()
    return torch.compile(network)

def frozen(channels, size, classes):
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * (size - 2) ** 2, 8), nn.ReLU(), nn.Linear(8, classes),
    )
    network[:2].requires_grad_(False)
    network[4].bias.requires_grad_(False)
    return network
"""

# More such networks, to stand below these in one file: with buffers, constants, hooks, parametrizations and functions
# of their own.
NETWORKS_WITH_STATE = """
import random
import numpy as np

class Counting(nn.Module):
    \"\"\"Divides by a running mean of sizes, in a buffer of any kind.\"\"\"

    def __init__(self, persistent, twice=False):
        super().__init__()
        self.register_buffer("size", torch.ones(1), persistent=persistent)
        self.register_buffer("again", self.size if twice else None, persistent=persistent)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.size.mul_(2.0)
        return torch.tanh(x / (self.size if self.again is None else self.again))

def counting(channels, size, classes, persistent=True, twice=False):
    width = channels * size * size
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 16), Counting(persistent, twice), nn.Linear(16, classes))

def passing(*shape):
    return counting(*shape, persistent=False)

def doubled(*shape):
    return counting(*shape, twice=True)

def constant_in_two_places(channels, size, classes):
    network = passing(channels, size, classes)
    order = torch.arange(16).flip(0)
    for layer in network:
        layer.register_buffer("order", order)
    return network

def plain_norm(channels, size, classes):
    first = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(4 * (size - 2) ** 2, classes))

def backward_hook(channels, size, classes):
    network = counting(channels, size, classes)
    network[1].register_full_backward_hook(lambda layer, inputs, outputs: tuple(
        None if value is None else 3 * value for value in inputs))
    network[2].register_full_backward_hook(lambda layer, inputs, outputs: (3 * inputs[0],))
    return network

def hooked_dropout(channels, size, classes):
    first = nn.Flatten(), nn.Linear(channels * size * size, 16)
    network = nn.Sequential(*first, nn.Dropout(0.1), nn.Linear(16, classes))
    network[2].register_forward_hook(lambda layer, given, output: output + 1)
    return network

def spectral(channels, size, classes):
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(channels * size * size, 16))
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(16, classes))

def weight_norm(channels, size, classes):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(channels * size * size, 16))
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(16, classes))

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]

class Own(nn.Module):
    def __init__(self, channels, size, classes, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(channels * size * size, 16)
        self.last = nn.Linear(16, classes)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x.flatten(1)
        if self.checkpointed:
            return self.last(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False).tanh())
        return self.last(Square.apply(self.first(x)))

def old_function(*shape):
    return Own(*shape)

def checkpointed(*shape):
    return Own(*shape, True)

class Masked(nn.Module):
    \"\"\"Has constants in no buffer, which are drawn from the global generators.\"\"\"

    def __init__(self, width):
        super().__init__()
        self.signs = torch.tensor(np.random.choice([-1.0, 1.0], width), dtype=torch.float32)
        self.order = random.sample(range(width), width)

    def forward(self, x):
        return (x * self.signs)[:, self.order]

def drawing(channels, size, classes):
    width = channels * size * size
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 16), Masked(16), nn.ReLU(), nn.Linear(16, classes))

def new_tensor(channels, size, classes):
    class Placed(nn.Module):
        def forward(self, x):
            y = torch.zeros(len(x), 16)
            y[:, :16] = x[:, :16]
            return y
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 16), Placed(), nn.Linear(16, classes))
"""


def network_source(forward, layers=""):
    """Returns the text of a file with the network `Net`.

    `forward` are the statements that end its `forward`, and `layers` those of its `__init__` that make further layers.
    """
    return NETWORK_TEMPLATE.replace("FORWARD", forward).replace("LAYERS", layers)
