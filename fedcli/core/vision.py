"""torchvision, also where its compiled part does not load; use `from fedcli.core.vision import torchvision`."""

import torch

try:
    import torchvision
except RuntimeError as error:
    # torchvision's wheel for CUDA cannot load its compiled operators beside a torch for the CPU, and then stumbles over
    # two whose shapes it describes in Python. Networks, data sets and transforms need neither: their schemas suffice.
    if "torchvision::nms does not exist" not in str(error):
        raise
    _schemas = torch.library.Library("torchvision", "FRAGMENT")  # the schemas live as long as this object
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
