"""What is done with an image: decode, crop, resize, flip, normalise."""

from .augment import ColorJitter
from .contract import ArraySpec, Transform, TransformInput
from .decode import decode_rgb
from .pixel_format import IMAGENET_MEAN, IMAGENET_STD
from .transforms import EvalTransform, TrainTransform

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
