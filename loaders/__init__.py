"""From shards to the training step."""

# Workers import this package, hence nothing here is heavier than numpy and OpenCV.
from .augment import ColorJitter
from .decoding import decode_rgb
from .failures import WorkFailed
from .fake_data import FakeData
from .flow import Flow
from .loader import Loader
from .loader_stats import LoaderStats
from .order import GlobalShuffle, LocalShuffle
from .pixels import IMAGENET_MEAN, IMAGENET_STD
from .receipt import Receipt
from .slots import SlotsHeld
from .timings import EngineStats
from .transforms import ArraySpec, EvalTransform, TrainTransform, Transform, TransformInput
from .verdict import StageLoad, Verdict

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ArraySpec",
    "ColorJitter",
    "EngineStats",
    "EvalTransform",
    "FakeData",
    "Flow",
    "GlobalShuffle",
    "Loader",
    "LoaderStats",
    "LocalShuffle",
    "Receipt",
    "SlotsHeld",
    "StageLoad",
    "TrainTransform",
    "Transform",
    "TransformInput",
    "Verdict",
    "WorkFailed",
    "decode_rgb",
]
