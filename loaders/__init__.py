"""From shards to the training step."""

# Worker processes import this package: it imports nothing heavier than numpy and OpenCV.
from shardprep.loaders.buffers.slots import SlotsHeld
from shardprep.loaders.engine.protocol.worker_errors import WorkFailed
from shardprep.loaders.engine.stats import EngineStats
from shardprep.loaders.fake.fake_data import FakeData
from shardprep.loaders.loader.bottleneck import StageLoad, Verdict
from shardprep.loaders.loader.loader import Loader
from shardprep.loaders.loader.replaying.parting import Parting
from shardprep.loaders.loader.replaying.replayed import Replayed, ReplayedRecord
from shardprep.loaders.loader.replaying.run_card import RunCard
from shardprep.loaders.loader.replaying.sheet import ContactSheet
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.order.class_mixing import SortedByClass
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.order.shuffle_quality import ShuffleQuality
from shardprep.loaders.transforms.augment import ColorJitter
from shardprep.loaders.transforms.contract import ArraySpec, Transform, TransformInput
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.geometry.shown import ShownPart
from shardprep.loaders.transforms.pixel_format import IMAGENET_MEAN, IMAGENET_STD
from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform

from .flow import Flow

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ArraySpec",
    "ColorJitter",
    "ContactSheet",
    "EngineStats",
    "EvalTransform",
    "FakeData",
    "Flow",
    "GlobalShuffle",
    "Loader",
    "LoaderStats",
    "LocalShuffle",
    "Parting",
    "Receipt",
    "Replayed",
    "ReplayedRecord",
    "RunCard",
    "ShownPart",
    "ShuffleQuality",
    "SlotsHeld",
    "SortedByClass",
    "StageLoad",
    "TrainTransform",
    "Transform",
    "TransformInput",
    "Verdict",
    "WorkFailed",
    "decode_rgb",
]
