"""From shards to the training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from shardprep.loaders.batches.slots import SlotsHeld
    from shardprep.loaders.engine.engine import EngineStats
    from shardprep.loaders.engine.messages import WorkFailed
    from shardprep.loaders.flow.flow import Flow
    from shardprep.loaders.loader.fake import FakeData
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.loader.replay import Parting, Replayed, ReplayedRecord
    from shardprep.loaders.loader.run_card import RunCard
    from shardprep.loaders.loader.sheet import ContactSheet
    from shardprep.loaders.loader.stats import LoaderStats, StageLoad, Verdict
    from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle
    from shardprep.loaders.order.quality import ShuffleQuality, SortedByClass
    from shardprep.loaders.order.receipt import Receipt
    from shardprep.loaders.transforms.augment import ColorJitter
    from shardprep.loaders.transforms.contract import (
        IMAGENET_MEAN,
        IMAGENET_STD,
        ArraySpec,
        Transform,
        TransformInput,
    )
    from shardprep.loaders.transforms.decode import decode_rgb
    from shardprep.loaders.transforms.geometry import ShownPart
    from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "shardprep.loaders.batches.slots": ["SlotsHeld"],
            "shardprep.loaders.engine.engine": ["EngineStats"],
            "shardprep.loaders.engine.messages": ["WorkFailed"],
            "shardprep.loaders.flow.flow": ["Flow"],
            "shardprep.loaders.loader.fake": ["FakeData"],
            "shardprep.loaders.loader.loader": ["Loader"],
            "shardprep.loaders.loader.replay": ["Parting", "Replayed", "ReplayedRecord"],
            "shardprep.loaders.loader.run_card": ["RunCard"],
            "shardprep.loaders.loader.sheet": ["ContactSheet"],
            "shardprep.loaders.loader.stats": ["LoaderStats", "StageLoad", "Verdict"],
            "shardprep.loaders.order.epoch_order": ["GlobalShuffle", "LocalShuffle"],
            "shardprep.loaders.order.quality": ["ShuffleQuality", "SortedByClass"],
            "shardprep.loaders.order.receipt": ["Receipt"],
            "shardprep.loaders.transforms.augment": ["ColorJitter"],
            "shardprep.loaders.transforms.contract": [
                "ArraySpec",
                "IMAGENET_MEAN",
                "IMAGENET_STD",
                "Transform",
                "TransformInput",
            ],
            "shardprep.loaders.transforms.decode": ["decode_rgb"],
            "shardprep.loaders.transforms.geometry": ["ShownPart"],
            "shardprep.loaders.transforms.transforms": ["EvalTransform", "TrainTransform"],
        },
    )
