"""What is on disk: sources, records, shards, manifest, conversion, verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from shardprep.formats.conversion.convert import Converted, ConvertedPart, convert, convert_part
    from shardprep.formats.conversion.dry_run import DryRun, PlannedSplit, plan_conversion
    from shardprep.formats.conversion.finish import SkippedCause, SkippedImages
    from shardprep.formats.conversion.join import Joined, join
    from shardprep.formats.conversion.plan import PlanOptions
    from shardprep.formats.conversion.prepare import ConvertOptions
    from shardprep.formats.conversion.save import write_dataset
    from shardprep.formats.conversion.saved_items import BadItem
    from shardprep.formats.errors import (
        BadImage,
        BadTarget,
        CorruptRecord,
        DataError,
        DatasetNotFound,
        LabelConflict,
        ManifestDamaged,
        MissingExtra,
        NoSpace,
        OperationError,
        OutputBusy,
        PlanMismatch,
        ShardDamaged,
        ShardprepError,
        SourceDamaged,
        SourceIncomplete,
        UnknownVersion,
        UsageError,
        WorkerDied,
    )
    from shardprep.formats.exports.export import Exported, export
    from shardprep.formats.images.header import read_image_header
    from shardprep.formats.images.info import ImageFlag, ImageInfo
    from shardprep.formats.records.labels import LabelSpace
    from shardprep.formats.records.record import Record
    from shardprep.formats.records.schema import Field, Schema
    from shardprep.formats.reports.examine import Examination, examine, report
    from shardprep.formats.runtime.executors import RayExecutor
    from shardprep.formats.runtime.progress import Progress
    from shardprep.formats.shards.dataset import Dataset, TransformedDataset
    from shardprep.formats.shards.manifest import Manifest, read_manifest
    from shardprep.formats.shards.summary import Summary, summarise
    from shardprep.formats.sources.sample import make_sample
    from shardprep.formats.sources.source import SourceOptions
    from shardprep.formats.storage.collection import Collection, collect, open_collection
    from shardprep.formats.storage.open import open_dataset
    from shardprep.formats.transfer.fetch import FetchedDataset, fetch
    from shardprep.formats.transfer.publish import PublishedDataset, publish
    from shardprep.formats.transfer.repair import repair
    from shardprep.formats.transfer.to_url import ConvertedTo, convert_to_url
    from shardprep.formats.verification.report import Finding, Report
    from shardprep.formats.verification.verify import verify

__all__ = [
    "BadImage",
    "BadItem",
    "BadTarget",
    "Collection",
    "ConvertOptions",
    "Converted",
    "ConvertedPart",
    "ConvertedTo",
    "CorruptRecord",
    "DataError",
    "Dataset",
    "DatasetNotFound",
    "DryRun",
    "Examination",
    "Exported",
    "FetchedDataset",
    "Field",
    "Finding",
    "ImageFlag",
    "ImageInfo",
    "Joined",
    "LabelConflict",
    "LabelSpace",
    "Manifest",
    "ManifestDamaged",
    "MissingExtra",
    "NoSpace",
    "OperationError",
    "OutputBusy",
    "PlanMismatch",
    "PlanOptions",
    "PlannedSplit",
    "Progress",
    "PublishedDataset",
    "RayExecutor",
    "Record",
    "Report",
    "Schema",
    "ShardDamaged",
    "ShardprepError",
    "SkippedCause",
    "SkippedImages",
    "SourceDamaged",
    "SourceIncomplete",
    "SourceOptions",
    "Summary",
    "TransformedDataset",
    "UnknownVersion",
    "UsageError",
    "WorkerDied",
    "collect",
    "convert",
    "convert_part",
    "convert_to_url",
    "examine",
    "export",
    "fetch",
    "join",
    "make_sample",
    "open_collection",
    "open_dataset",
    "plan_conversion",
    "publish",
    "read_image_header",
    "read_manifest",
    "repair",
    "report",
    "summarise",
    "verify",
    "write_dataset",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "shardprep.formats.conversion.convert": ["Converted", "ConvertedPart", "convert", "convert_part"],
            "shardprep.formats.conversion.dry_run": ["DryRun", "PlannedSplit", "plan_conversion"],
            "shardprep.formats.conversion.finish": ["SkippedCause", "SkippedImages"],
            "shardprep.formats.conversion.join": ["Joined", "join"],
            "shardprep.formats.conversion.plan": ["PlanOptions"],
            "shardprep.formats.conversion.prepare": ["ConvertOptions"],
            "shardprep.formats.conversion.save": ["write_dataset"],
            "shardprep.formats.conversion.saved_items": ["BadItem"],
            "shardprep.formats.errors": [
                "BadImage",
                "BadTarget",
                "CorruptRecord",
                "DataError",
                "DatasetNotFound",
                "LabelConflict",
                "ManifestDamaged",
                "MissingExtra",
                "NoSpace",
                "OperationError",
                "OutputBusy",
                "PlanMismatch",
                "ShardDamaged",
                "ShardprepError",
                "SourceDamaged",
                "SourceIncomplete",
                "UnknownVersion",
                "UsageError",
                "WorkerDied",
            ],
            "shardprep.formats.exports.export": ["Exported", "export"],
            "shardprep.formats.images.header": ["read_image_header"],
            "shardprep.formats.images.info": ["ImageFlag", "ImageInfo"],
            "shardprep.formats.records.labels": ["LabelSpace"],
            "shardprep.formats.records.record": ["Record"],
            "shardprep.formats.records.schema": ["Field", "Schema"],
            "shardprep.formats.reports.examine": ["Examination", "examine", "report"],
            "shardprep.formats.runtime.executors": ["RayExecutor"],
            "shardprep.formats.runtime.progress": ["Progress"],
            "shardprep.formats.shards.dataset": ["Dataset", "TransformedDataset"],
            "shardprep.formats.shards.manifest": ["Manifest", "read_manifest"],
            "shardprep.formats.shards.summary": ["Summary", "summarise"],
            "shardprep.formats.sources.sample": ["make_sample"],
            "shardprep.formats.sources.source": ["SourceOptions"],
            "shardprep.formats.storage.collection": ["Collection", "collect", "open_collection"],
            "shardprep.formats.storage.open": ["open_dataset"],
            "shardprep.formats.transfer.fetch": ["FetchedDataset", "fetch"],
            "shardprep.formats.transfer.publish": ["PublishedDataset", "publish"],
            "shardprep.formats.transfer.repair": ["repair"],
            "shardprep.formats.transfer.to_url": ["ConvertedTo", "convert_to_url"],
            "shardprep.formats.verification.report": ["Finding", "Report"],
            "shardprep.formats.verification.verify": ["verify"],
        },
    )
