"""What a user's file must leave as it is in the process, since all runs of a command share it.

A file that sets PyTorch's default type, a flag of a backend or a function of a library anew changes the results of
every method beside it, and no record would say so.
"""

import inspect
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fedcli.errors import UserError

LIBRARIES = ("math", "random", "numpy", "numpy.linalg", "numpy.random", "torch")
PARTS_OF_TORCH = ("autograd", "func", "linalg", "nn", "nn.functional", "nn.init", "optim", "random", "special")
WITH_CLASSES = ("torch", "torch.nn")  # whose classes are looked into as well
FLAGS = {  # of modules inside of torch
    "backends.cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "backends.cuda.matmul": (
        "allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
    ),
    "backends.mkldnn": ("enabled",),
    "backends.opt_einsum": ("enabled",),
    "utils.deterministic": ("fill_uninitialized_memory",),
}  # fmt: skip
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # kernels on CUDA, each of which can be switched off


class ProcessSetting(NamedTuple):
    """A setting of the process."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _settings() -> dict[str, ProcessSetting]:
    """Returns the settings by the name of what sets each."""
    import numpy as np  # late, as PyTorch: help needs neither
    import torch

    debug_mode = ProcessSetting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
    precision = ProcessSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    device = ProcessSetting(
        torch.get_default_device,
        # Nothing set is the CPU; to set the CPU would put a layer around each call.
        lambda old: torch.set_default_device(None if old.type == "cpu" else old),
    )
    settings = {
        "torch.set_default_dtype": ProcessSetting(torch.get_default_dtype, torch.set_default_dtype),
        "torch.set_default_device": device,
        "torch.set_num_threads": ProcessSetting(torch.get_num_threads, torch.set_num_threads),
        "torch.set_grad_enabled": ProcessSetting(torch.is_grad_enabled, torch.set_grad_enabled),
        "torch.set_float32_matmul_precision": precision,
        "torch.use_deterministic_algorithms": debug_mode,
        "torch.set_flush_denormal": ProcessSetting(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
        "numpy.seterr": ProcessSetting(np.geterr, lambda old: np.seterr(**old)),
        "os.chdir": ProcessSetting(os.getcwd, os.chdir),
    }
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        settings[f"signal.signal({number.name}, ...)"] = _signal_setting(number)
    for path, names in FLAGS.items():
        module = torch
        for part in path.split("."):
            module = getattr(module, part)
        for name in names:
            settings[f"torch.{path}.{name}"] = _attribute_setting(module, name)
    for name in ATTENTION:
        read = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        settings[f"torch.backends.cuda.enable_{name}_sdp"] = ProcessSetting(
            read, getattr(torch.backends.cuda, f"enable_{name}_sdp")
        )
    for name, hooks in list(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_") and isinstance(hooks, dict):
            kind = name.removeprefix("_global_")
            settings[f"a hook on all modules ({kind})"] = _dict_setting(hooks)
    return settings


def _signal_setting(number: signal.Signals) -> ProcessSetting:
    return ProcessSetting(lambda: signal.getsignal(number), lambda old: signal.signal(number, old))


def _attribute_setting(module: Any, name: str) -> ProcessSetting:
    return ProcessSetting(lambda: getattr(module, name), lambda old: setattr(module, name, old))


def _dict_setting(hooks: dict[Any, Any]) -> ProcessSetting:
    def write(old: dict[Any, Any]) -> None:
        hooks.clear()
        hooks.update(old)

    return ProcessSetting(lambda: dict(hooks), write)


def _is_ours(name: str) -> bool:
    package, _, _ = name.partition(".")
    return package == "fedcli"


def _modules_and_classes() -> Iterator[tuple[str, Any]]:
    """Returns the modules and classes whose attributes count: of libraries, of PyTorch, and our own that are imported.

    Dictionaries are copied before they are looked through, since another thread may import a module meanwhile.
    """
    names = [*LIBRARIES, *(f"torch.{part}" for part in PARTS_OF_TORCH)]
    names += filter(_is_ours, list(sys.modules))
    for name in names:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType):
            continue
        yield name, module
        if name in WITH_CLASSES or _is_ours(name):
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and (name in WITH_CLASSES or value.__module__ == name):
                    yield f"{name}.{key}", value


def _must_stay(name: str, key: str, value: Any) -> bool:
    """Whether an attribute of a module or class may not change: functions and properties; of our own also constants."""
    if callable(value) or isinstance(value, property):
        return True
    return _is_ours(name) and not key.startswith("__")


class SavedSettings(NamedTuple):
    """The settings of the process as they were."""

    values: dict[str, Any]  # by the name of what sets each

    def put_back(self) -> list[str]:
        """Puts back what has changed, and returns it in words."""
        changes = []
        for name, setting in _settings().items():
            old = self.values[name]
            now = setting.read()
            if now != old:
                changes.append(f"{name} (got {now}, was {old})")
                with suppress(Exception):  # it cannot be put back, as a handler from another thread
                    setting.write(old)
        return changes


class SavedAttributes(NamedTuple):
    """The attributes of a module or a class as they were."""

    name: str  # of the module or class
    container: Any  # the module or class itself
    attributes: dict[str, Any]

    def put_back(self) -> list[str]:
        """Puts back what has changed, and returns it in words."""
        now = vars(self.container)
        if _is_same(now, self.attributes):  # nearly always, and a hundred times as fast as to look at each attribute
            return []
        changed = []
        for key, old in self.attributes.items():
            new = now.get(key)
            if new is not old and _must_stay(self.name, key, old) and not _is_wrapped_by_its_library(new, old):
                changed.append(key)
                setattr(self.container, key, old)
        for key in _overriding(self.container, self.attributes):
            changed.append(key)
            delattr(self.container, key)
        return [f"{self.name}.{key} (got another one)" for key in changed]


class SavedDict(NamedTuple):
    """A constant of ours that is a dict, as it was."""

    name: str
    constant: dict[Any, Any]  # the dict itself
    items: dict[Any, Any]

    def put_back(self) -> list[str]:
        """Puts back what has changed, and returns it in words."""
        keys = {*self.constant, *self.items}
        changed = [key for key in keys if self.constant.get(key, _ABSENT) is not self.items.get(key, _ABSENT)]
        if changed:
            self.constant.clear()
            self.constant.update(self.items)
        return [f"{self.name}[{key!r}] (got another one)" for key in changed]


_ABSENT = object()  # of a key that a dict lacks
ProcessState = list[SavedSettings | SavedAttributes | SavedDict]


def _read_state() -> ProcessState:
    settings = SavedSettings({name: setting.read() for name, setting in _settings().items()})
    attributes = []
    dicts = []
    for name, container in _modules_and_classes():
        attributes.append(SavedAttributes(name, container, vars(container).copy()))
        if not isinstance(container, ModuleType) or not _is_ours(name):
            continue
        for key, value in list(vars(container).items()):
            if key.isupper() and isinstance(value, dict):
                dicts.append(SavedDict(f"{name}.{key}", value, dict(value)))
    return [settings, *attributes, *dicts]


def _put_back(before: ProcessState) -> list[str]:
    """Puts back what has changed, and returns it in words."""
    changes = []
    for saved in before:
        changes += saved.put_back()
    return changes


def _is_same(now: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether both hold the same objects by the same names, in the same order."""
    return (
        len(now) == len(old)
        and all(map(operator.is_, now.values(), old.values()))
        and all(map(operator.eq, now.keys(), old.keys()))
    )


def _overriding(container: Any, before: dict[str, Any]) -> list[str]:
    """Returns the functions that a class has got since, and that stand before those of the classes it is made of."""
    if not isinstance(container, type):
        return []
    inherited: set[str] = set()
    for base in container.__mro__[1:]:
        inherited.update(vars(base))
    added = [key for key, value in list(vars(container).items()) if key not in before and callable(value)]
    return [key for key in added if key in inherited]


def _is_wrapped_by_its_library(new: Any, old: Any) -> bool:
    """Whether a function is the old one in a wrapper of its own library, as some get when torch._dynamo is imported."""
    if not isinstance(old, FunctionType) or not isinstance(new, FunctionType):
        return False
    if inspect.unwrap(new, stop=lambda inner: inner is old) is not old:
        return False
    package, _, _ = old.__module__.partition(".")
    file = getattr(sys.modules[package], "__file__", None)
    return file is not None and Path(new.__code__.co_filename).is_relative_to(Path(file).parent)


@contextmanager
def unchanged(files: Sequence[str]) -> Iterator[None]:
    """Refuses what the user's files change in the process inside, and puts it back in any case; without files, nothing.

    Raises:
        UserError: Names the first change.
    """
    if not files:
        yield
        return
    import torch  # noqa: F401  # before a file does, so that what it changes there is seen

    before = _read_state()
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    changes = _put_back(before)
    if changes:
        first, *others = changes
        more = f", and {len(others)} more" if others else ""
        names = "', '".join(files)
        source = f"the file '{names}'"
        if len(files) > 1:  # which of them it was is not known
            source = f"one of the files '{names}'"
        raise UserError(
            f"{source} changes {first}{more} for the whole process, and so for other methods; leave it as it "
            "is, or write a function of your own and call it."
        )
