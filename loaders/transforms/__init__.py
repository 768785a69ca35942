"""What is done with an image: decode, crop, resize, flip, normalise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from shardprep.loaders.transforms.augment import ColorJitter
    from shardprep.loaders.transforms.contract import (
        IMAGENET_MEAN,
        IMAGENET_STD,
        ArraySpec,
        Transform,
        TransformInput,
    )
    from shardprep.loaders.transforms.decode import decode_rgb
    from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ArraySpec",
    "ColorJitter",
    "EvalTransform",
    "TrainTransform",
    "Transform",
    "TransformInput",
    "decode_rgb",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "shardprep.loaders.transforms.augment": ["ColorJitter"],
            "shardprep.loaders.transforms.contract": [
                "ArraySpec",
                "IMAGENET_MEAN",
                "IMAGENET_STD",
                "Transform",
                "TransformInput",
            ],
            "shardprep.loaders.transforms.decode": ["decode_rgb"],
            "shardprep.loaders.transforms.transforms": ["EvalTransform", "TrainTransform"],
        },
    )
