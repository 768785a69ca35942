"""What is on disk: sources, records, shards, manifest, conversion, verification."""

from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.conversion.building.plan import PlanOptions
from shardprep.formats.conversion.convert import Converted, convert
from shardprep.formats.conversion.convert_part import ConvertedPart, convert_part
from shardprep.formats.conversion.dry_run import DryRun, PlannedSplit, plan_conversion
from shardprep.formats.conversion.joining.join import Joined, join
from shardprep.formats.conversion.preparation import ConvertOptions
from shardprep.formats.conversion.skipped import SkippedCause, SkippedImages
from shardprep.formats.conversion.writing.item_coder import BadItem
from shardprep.formats.conversion.writing.write_dataset import write_dataset
from shardprep.formats.dataset.collecting.collect import collect
from shardprep.formats.dataset.collecting.collection import Collection, open_collection
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.examining.examination import Examination
from shardprep.formats.dataset.examining.examine import examine, report
from shardprep.formats.dataset.manifest import Manifest, read_manifest
from shardprep.formats.dataset.remote.fetching.fetch import fetch
from shardprep.formats.dataset.remote.fetching.fetched_dataset import FetchedDataset
from shardprep.formats.dataset.remote.open_dataset import open_dataset
from shardprep.formats.dataset.remote.publishing.convert_to_url import convert_to_url
from shardprep.formats.dataset.remote.publishing.converted_to import ConvertedTo
from shardprep.formats.dataset.remote.publishing.publish import publish
from shardprep.formats.dataset.remote.publishing.published_dataset import PublishedDataset
from shardprep.formats.dataset.remote.repairing.repair import repair
from shardprep.formats.dataset.remote.verify import verify
from shardprep.formats.dataset.summary import Summary, summarise
from shardprep.formats.dataset.verification.report import Finding, Report
from shardprep.formats.export.export import Exported, export
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import ImageFlag, ImageInfo
from shardprep.formats.processes.executors.ray_executor import RayExecutor
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import Record
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.sample.make_sample import make_sample

from .errors import (
    BadImage,
    BadTarget,
    CorruptRecord,
    DataError,
    LabelConflict,
    ManifestDamaged,
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
from .progress import Progress

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
