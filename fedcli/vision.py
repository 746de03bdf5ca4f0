"""torchvision: imported when it is needed, since that is slow, and also where its operators do not load."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any


@cache
def torchvision() -> ModuleType:
    """Imports torchvision."""
    return with_operators(import_module, "torchvision")


def with_operators(import_: Callable[..., ModuleType], *arguments: Any, **keywords: Any) -> ModuleType:
    """Imports torchvision, or what imports it, also where its operators do not load.

    Those of the wheel for CUDA do not beside a torch for the CPU, and the import fails at two whose shapes it describes
    in Python. Networks, data sets and transforms need only their schemas.
    """
    try:
        return import_(*arguments, **keywords)
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    import torch  # here, since it is slow

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return import_(*arguments, **keywords)
