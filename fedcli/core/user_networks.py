"""Networks from a user's own file: made into body and head, and tried on random images before anything is trained."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedcli.core.body_and_head import Backbone, number_dropouts
from fedcli.core.draws import preserve_random_state
from fedcli.core.graphs import is_out_of_memory
from fedcli.core.keyed_draws import KEY, KeyedDraws, KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d, change_class
from fedcli.core.trees import leaves
from fedcli.userfiles import UserFunction, blame


class LayerCall(NamedTuple):
    """A call of a layer while a network ran."""

    layer: nn.Module
    output: Tensor  # a copy of what the layer gave, or of a tensor in it


class TriedModule(NamedTuple):
    """A user's module, and what its layers and itself give of four images before it is trained."""

    module: nn.Module
    x: Tensor  # the images
    calls_of_few: list[LayerCall]  # of its layers, for the first three of them
    calls: list[LayerCall]  # those for all
    logits: Any


def network_from_user(function: UserFunction, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes a network of a user's module: its last nn.Linear becomes the head, whose input are the features.

    nn.BatchNorm2d and nn.Dropout become the layers that take mask and key. Runs on random images show that the
    function is still the user's, that no image changes another's output, and that all draws come from the key.

    Raises:
        UserError: The first of these that does not hold, or what an engine that trains copies of the network's tensors
            could not keep.
    """
    function.refuse_other_order("channels", "image_size", "num_classes")
    with preserve_random_state():
        tried_again = _try_module(function, channels, image_size, num_classes)
    tried = _try_module(function, channels, image_size, num_classes)
    module = tried.module
    if tried_again.module is module:
        raise function.refuse("gives the same module each time, which no seed draws", "make a new one in each call")
    if isinstance(tried.logits, Tensor) and not torch.equal(tried_again.logits.nan_to_num(), tried.logits.nan_to_num()):
        raise function.refuse(
            "is another network each time it is made, so that a loaded model would not be the trained one",
            "draw by torch, numpy.random or random as they are seeded, or read what was drawn from a file",
        )
    shape = tuple(tried.logits.shape) if isinstance(tried.logits, Tensor) else type(tried.logits).__name__
    if shape != (len(tried.x), num_classes):
        raise function.refuse(
            f"gives no logits of {num_classes} classes (got {shape} of 4 images)", "return logits [B, C]"
        )
    head = _find_head(tried, function)
    _refuse_shared_memory(module, function)

    def layer_with_mask_or_key(layer: nn.Module) -> nn.Module:
        if type(layer) is nn.BatchNorm2d:
            change_class(layer, MaskedBatchNorm2d, num_batches_tracked=None, mask=None)
        if type(layer) is nn.Dropout and layer.p < 1 and _is_called_once(layer, tried) and not _has_hooks(layer):
            return KeyedDropout(layer.p)
        return layer

    _swap_layers(module, layer_with_mask_or_key)
    whole = copy.deepcopy(module)  # with the head in its place
    head_name = next(name for name, layer in module.named_modules() if layer is head)
    _swap_layers(module, lambda layer: nn.Identity() if layer is head else layer)
    guard = partial(blame, function.path, passes=is_out_of_memory)
    network = Backbone(module, head.in_features, num_classes, colour=False, draws=KeyedDraws(), guard=guard)
    network.head = head
    with torch.no_grad():
        _refuse_unfit(network, whole, head_name, function, tried.x)
    return network.train()


def _is_called_once(layer: nn.Module, tried: TriedModule) -> bool:
    """Says whether a layer took all images at once, first the three and then the four."""
    calls = [call for call in (*tried.calls_of_few, *tried.calls) if call.layer is layer]
    sizes = [len(call.output) for call in calls if call.output.dim()]
    return sizes == [3, 4]


def _find_head(tried: TriedModule, function: UserFunction) -> nn.Linear:
    """Returns the last linear layer that was called; refuses another kind of layer there, and a frozen one."""
    head = next((call.layer for call in reversed(tried.calls) if isinstance(call.layer, nn.Linear)), None)
    if type(head) is not nn.Linear or head.bias is None or not (head.weight.requires_grad and head.bias.requires_grad):
        innermost = [call.layer for call in tried.calls if not call.layer._modules]
        last = type(innermost[-1]).__name__ if innermost else "no layer that was called"
        raise function.refuse(
            f"does not end in an nn.Linear with bias that is trained, of features [B, D] (got {last})",
            "let it be the last layer, and freeze other layers only",
        )
    return head


def _try_module(function: UserFunction, channels: int, image_size: int, num_classes: int) -> TriedModule:
    """Makes a user's module, without wrappers of `torch.compile`, and lets it take some images in evaluation mode."""
    module = function(channels, image_size, num_classes)
    if not isinstance(module, nn.Module):
        raise function.refuse(f"gives no torch.nn.Module (got {type(module).__name__})", "return one")
    module = _uncompile(module)
    _swap_layers(module, _uncompile)
    _refuse_batch_statistics(module, function)
    _refuse_types_and_hooks(module, function)
    x = torch.randn(4, channels, image_size, image_size)
    # With our functions of attention: torch's own for evaluation leave out the layers inside.
    with torch.no_grad(), blame(function.path), KeyedDraws():
        few = _watch(module.eval(), x[:3])  # lazy layers get their shapes
        all_images = _watch(module, x)
    return TriedModule(module, x, few.calls, all_images.calls, all_images.output)


def _refuse_batch_statistics(module: nn.Module, function: UserFunction) -> None:
    """Refuses batch normalisation that mixes images in evaluation, or whose statistics cannot be averaged."""
    for name, layer in module.named_modules():
        if type(layer) is nn.BatchNorm2d and not layer.track_running_stats:
            raise function.refuse(
                f"has the nn.BatchNorm2d '{name}' with track_running_stats=False, which mixes images in evaluation too",
                "leave track_running_stats=True",
            )
        if type(layer) is nn.BatchNorm2d and layer.momentum is None:
            raise function.refuse(
                f"has the nn.BatchNorm2d '{name}' with momentum=None, whose count of batches cannot be averaged",
                "give it a momentum, such as momentum=0.1",
            )


def _refuse_types_and_hooks(module: nn.Module, function: UserFunction) -> None:
    """Refuses tensors that are not float32, and hooks on parameters."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise function.refuse(
                f"has a hook on the parameter '{name}', which would not be called",
                "freeze it by requires_grad_(False), or change the gradient in the method's local step",
            )
    tensors: dict[str, dict[str, Tensor]] = {
        "parameter": dict(module.named_parameters()), "buffer": dict(module.named_buffers()),
    }  # fmt: skip
    for kind, named in tensors.items():
        for name, value in named.items():
            if value.is_complex():
                raise function.refuse(
                    f"has the {kind} '{name}' of type {value.dtype}", "keep real and imaginary part as two of float32"
                )
            if value.is_floating_point() and value.dtype != torch.float32:
                raise function.refuse(
                    f"has the {kind} '{name}' of type {value.dtype}",
                    "leave out .half(), .bfloat16() or .double(), and choose the type by --precision",
                )
            _, _, last_part = name.rpartition(".")
            if last_part == KEY and kind == "buffer":
                raise function.refuse(f"has a buffer '{name}', as those of dropout are called", "call it otherwise")


def _has_hooks(layer: nn.Module) -> bool:
    has_forward_hooks = layer._forward_hooks or layer._forward_pre_hooks
    has_backward_hooks = layer._backward_hooks or layer._backward_pre_hooks
    return bool(has_forward_hooks or has_backward_hooks)


def _refuse_shared_memory(module: nn.Module, function: UserFunction) -> None:
    """Refuses a parameter in two places, and two tensors in the same memory, which would come apart."""
    names: dict[nn.Parameter, str] = {}
    for prefix, part in module.named_modules():
        for name, value in part.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if names.setdefault(value, name) != name:
                raise function.refuse(f"has a parameter in two places, '{names[value]}' and '{name}'", "make it two")
    owners: dict[int, str] = {}  # by the address of the memory
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        address = value.untyped_storage().data_ptr()
        if value.numel() and owners.setdefault(address, name) != name:
            raise function.refuse(
                f"has '{owners[address]}' and '{name}' in the same memory", "give each its own, as by .clone()"
            )


def _tenth_of_size(value: Tensor) -> Tensor:
    """Returns a tenth of the root of a tensor's mean square, or of 1 where that is 0; a scalar."""
    size = value.square().mean().sqrt().nan_to_num(0, 0, 0)
    return torch.where(size > 0, size, 1.0) / 10


_Module = TypeVar("_Module", bound=nn.Module)


def _perturb(network: _Module) -> _Module:
    """Moves each tensor of a network by a tenth of its size, by fixed draws, and returns the network.

    What is the identity for a tensor's first value is so no more.
    """
    draws = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.add_(_tenth_of_size(parameter) * torch.randn(parameter.shape, generator=draws))
    for buffer in network.buffers():
        if buffer.is_floating_point():  # upwards, since a variance must stay positive
            buffer.add_(_tenth_of_size(buffer) * torch.rand(buffer.shape, generator=draws))
    return network


def _refuse_other_function(
    network: Backbone, whole: nn.Module, head_name: str, function: UserFunction, x: Tensor
) -> None:
    """Refuses a network which is not its body and then its head, whatever its parameters are, in training or not.

    `whole` is the user's module with the head, of that name, where it stands in it.
    """
    theirs = _perturb(copy.deepcopy(whole))
    number_dropouts(theirs)
    ours = _copy_network(network)
    our_tensors = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    for name, value in (*theirs.named_parameters(), *theirs.named_buffers()):
        layer, _, last_part = name.rpartition(".")
        our_name = f"head.{last_part}" if layer == head_name else f"body.{name}"
        our_tensors[our_name].copy_(value)
    for train in (False, True):
        their_copy = copy.deepcopy(theirs).train(train)
        our_copy = _copy_network(ours).train(train)
        their_head = cast(nn.Linear, their_copy.get_submodule(head_name))
        for scale in (1.0, 1e4):  # large logits too, for what is the identity on small ones
            for head in (their_head, our_copy.head):
                head.weight.mul_(scale)
                head.bias.mul_(scale)
            with blame(function.path), KeyedDraws():
                expected = their_copy(x)
            _, logits = our_copy(x)
            bound = 1e-4 * expected.abs().nan_to_num(0, 0, 0).max().item()
            if not torch.allclose(logits, expected, 1e-4, bound, equal_nan=True):
                raise function.refuse(
                    "does not end in its last nn.Linear", "let that give the logits, and be called once"
                )


def _swap_layers(module: nn.Module, new: Callable[[nn.Module], nn.Module]) -> None:
    """Puts `new(layer)` in the place of every layer inside a module."""
    for parent in list(module.modules()):
        for key, layer in parent._modules.items():
            parent._modules[key] = None if layer is None else new(layer)


def _uncompile(layer: nn.Module) -> nn.Module:
    """Returns the layer that `torch.compile` has wrapped, or the layer without its compiled call."""
    layer = getattr(layer, "_orig_mod", layer)
    layer._compiled_call_impl = None
    return layer


class Watched(NamedTuple):
    """What a network gives, and the calls of its layers in the order in which they end."""

    output: Any
    calls: list[LayerCall]


def _watch(network: nn.Module, x: Tensor) -> Watched:
    """Runs a network, and notes what its layers give."""
    calls: list[LayerCall] = []

    def note(layer: nn.Module, arguments: tuple, output: Any) -> None:
        calls.extend(LayerCall(layer, leaf.clone()) for leaf in leaves(output) if isinstance(leaf, Tensor))

    with register_module_forward_hook(note):
        return Watched(network(x), calls)


def _copy_network(network: Backbone) -> Backbone:
    """Returns a copy that tells the same `draws` whether they are used."""
    return copy.deepcopy(network, {id(network.draws): network.draws})


def _refuse_unfit(network: Backbone, whole: nn.Module, head_name: str, function: UserFunction, x: Tensor) -> None:
    """Refuses a user's network that draws without the key, is another function, mixes images, or hides a state."""
    perturbed = _perturb(_copy_network(network))
    random_state = torch.get_rng_state()
    outputs_of_two = _run_layers(perturbed, x[:2], function)
    outputs_again = _run_layers(perturbed, x[:2], function)
    outputs_of_all = _run_layers(perturbed, x, function)
    where = _find_first_difference(outputs_of_two, outputs_again, torch.equal)
    if where or not torch.equal(torch.get_rng_state(), random_state):
        raise function.refuse(f"draws random numbers {where or 'without effect'}", "use nn.Dropout or F.dropout")
    _refuse_other_function(network, whole, head_name, function, x)
    if network.draws is not None and not network.draws.used:
        network.draws = None
    where = _find_first_difference(outputs_of_two, outputs_of_all, partial(torch.allclose, rtol=1e-4, atol=1e-4))
    if where:
        raise function.refuse(
            f"mixes the images of a batch {where}",
            "use nn.BatchNorm2d, nn.GroupNorm or nn.LayerNorm, and attention with batch_first=True",
        )
    _refuse_hidden_state(_copy_network(perturbed).train(), function, x)


class LayerOutput(NamedTuple):
    """What a layer has given in training, or a buffer's value after it."""

    title: str  # the layer's name and type
    output: Tensor


def _run_layers(network: Backbone, x: Tensor, function: UserFunction) -> list[LayerOutput]:
    """Returns what the layers of a copy give in training, but without batch statistics, and its buffers.

    Raises:
        UserError: The network puts a new tensor into a buffer.
    """
    trial = _copy_network(network).train()
    for norm in trial.norms:
        norm.eval()
    buffers = dict(trial.named_buffers(remove_duplicate=False))
    calls = _watch(trial, x).calls
    if any(value is not buffers[name] for name, value in trial.named_buffers(remove_duplicate=False)):
        raise function.refuse("puts a new tensor into a buffer", "change it in place, as by self.name.copy_(...)")
    calls += [LayerCall(trial, value) for value in buffers.values()]
    names = {layer: name.removeprefix("body.") for name, layer in trial.named_modules()}
    outputs = []
    for call in calls:
        title = f"'{names.get(call.layer, '')}' ({type(call.layer).__name__})"
        outputs.append(LayerOutput(title, call.output))
    return outputs


def _find_first_difference(outputs: list[LayerOutput], others: list[LayerOutput], is_same: Callable[..., bool]) -> str:
    """Says where some images give something else when they are the first among others; empty where they do not."""
    for alone, among_others in zip(outputs, others, strict=False):
        output = among_others.output
        if alone.output.dim():
            output = output[: len(alone.output)]
        if alone.output.shape == output.shape and not is_same(alone.output, output):
            return f"before or in the layer {alone.title}"
    return ""


def _refuse_hidden_state(network: Backbone, function: UserFunction, x: Tensor) -> None:
    """Refuses a network that changes a parameter or a shared buffer, or keeps what is in no buffer from batch to batch.

    Clients, threads and a run that is resumed would have other values, or the same where each should have its own.
    """
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    before = {name: value.clone() for name, value in tensors.items()}
    _, first_logits = network(x)
    for name, parameter in network.named_parameters():
        if not torch.equal(parameter, before[name]):
            changed = name.removeprefix("body.")
            raise function.refuse(f"changes the parameter '{changed}' in its forward", "change buffers only, in place")
    for name, buffer in network.named_buffers(remove_duplicate=False):
        first_name = next(other for other, tensor in network.named_buffers() if tensor is buffer)
        if name != first_name and not torch.equal(buffer, before[first_name]):
            both = f"'{first_name.removeprefix('body.')}' and '{name.removeprefix('body.')}'"
            raise function.refuse(
                f"changes a buffer in two places, {both}, which come apart on another device", "keep it in one layer"
            )
    for name, value in tensors.items():
        value.copy_(before[name])
    _, logits = network(x)
    if not torch.allclose(logits, first_logits, 1e-5, 1e-6, equal_nan=True):
        raise function.refuse(
            "keeps something from one batch to the next that is in no buffer",
            "register it by self.register_buffer, and change it in place",
        )
