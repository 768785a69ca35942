"""torchvision's import where its wheel is for CUDA and torch's for CPUs: it misses two operators.

No transform needs them, so they are declared here. A worker imports this module with what it defines.
"""

from __future__ import annotations

import random
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

ARE_MISSING = "+cpu" in version("torch") and "+cpu" not in version("torchvision")

if ARE_MISSING:
    _operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision.transforms import v2  # noqa: E402

from shardprep.loaders.transforms.torchvision import Torchvision  # noqa: E402


class Here(Torchvision):
    """A transform whose pickle names this module first."""


def three_generators(image: Any) -> Any:
    """One draw of each global generator that a transform may use."""
    return torch.rand(2), np.random.random(2), random.random()


def threads_in_use(image: Any) -> Any:
    return torch.get_num_threads()


TRAINING = v2.Compose(
    [
        v2.RandomResizedCrop(32, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
)
