"""What is on disk: sources, records, shards, manifest, conversion, verification."""

from .convert import Converted, ConvertOptions, convert
from .dataset import Dataset, open_dataset
from .errors import (
    BadImage,
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
from .image_header import ImageFlag, ImageInfo, read_image_header
from .labels import LabelSpace
from .manifest import Manifest, read_manifest
from .plan import PlanOptions
from .progress import Progress
from .record import Record
from .repair import repair
from .sample import make_sample
from .summary import Summary, summarise
from .verify import Finding, Report, verify

__all__ = [
    "BadImage",
    "ConvertOptions",
    "Converted",
    "CorruptRecord",
    "DataError",
    "Dataset",
    "Finding",
    "ImageFlag",
    "ImageInfo",
    "LabelConflict",
    "LabelSpace",
    "Manifest",
    "ManifestDamaged",
    "NoSpace",
    "OperationError",
    "OutputBusy",
    "PlanMismatch",
    "PlanOptions",
    "Progress",
    "Record",
    "Report",
    "ShardDamaged",
    "ShardprepError",
    "SourceDamaged",
    "SourceIncomplete",
    "Summary",
    "UnknownVersion",
    "UsageError",
    "WorkerDied",
    "convert",
    "make_sample",
    "open_dataset",
    "read_image_header",
    "read_manifest",
    "repair",
    "summarise",
    "verify",
]
