from .conversion.convert import (
    Converted as Converted,
    ConvertedPart as ConvertedPart,
    DryRun as DryRun,
    PlannedSplit as PlannedSplit,
    SkippedCause as SkippedCause,
    SkippedImages as SkippedImages,
    convert as convert,
    convert_part as convert_part,
    plan_conversion as plan_conversion,
)
from .conversion.join import Joined as Joined, join as join
from .conversion.plan import PlanOptions as PlanOptions
from .conversion.prepare import ConvertOptions as ConvertOptions
from .conversion.save import BadItem as BadItem, write_dataset as write_dataset
from .errors import (
    BadImage as BadImage,
    BadTarget as BadTarget,
    CorruptRecord as CorruptRecord,
    DataError as DataError,
    DatasetNotFound as DatasetNotFound,
    LabelConflict as LabelConflict,
    ManifestDamaged as ManifestDamaged,
    MissingExtra as MissingExtra,
    NoSpace as NoSpace,
    OperationError as OperationError,
    OutputBusy as OutputBusy,
    PlanMismatch as PlanMismatch,
    ShardDamaged as ShardDamaged,
    ShardprepError as ShardprepError,
    SourceDamaged as SourceDamaged,
    SourceIncomplete as SourceIncomplete,
    UnknownVersion as UnknownVersion,
    UsageError as UsageError,
    WorkerDied as WorkerDied,
)
from .exports.export import Exported as Exported, export as export
from .images.decode import DecoderDiffers as DecoderDiffers
from .images.header import (
    ImageFlag as ImageFlag,
    ImageInfo as ImageInfo,
    read_image_header as read_image_header,
)
from .records.record import LabelSpace as LabelSpace, Record as Record
from .records.schema import Field as Field, Schema as Schema
from .reports.examine import Examination as Examination, report as report
from .reports.find import ImageMatch as ImageMatch, find as find
from .reports.gate import GateCheck as GateCheck, GateResult as GateResult, gate as gate
from .runtime.jobs import RayExecutor as RayExecutor
from .runtime.progress import Progress as Progress
from .shards.dataset import Dataset as Dataset, TransformedDataset as TransformedDataset
from .shards.manifest import Manifest as Manifest, read_manifest as read_manifest
from .shards.summary import Summary as Summary, inspect as inspect
from .sources.sample import make_sample as make_sample
from .sources.source import SourceOptions as SourceOptions
from .storage.open import (
    Collection as Collection,
    collect as collect,
    open_collection as open_collection,
    open_dataset as open_dataset,
)
from .transfer.fetch import FetchedDataset as FetchedDataset, fetch as fetch
from .transfer.publish import (
    ConvertedTo as ConvertedTo,
    PublishedDataset as PublishedDataset,
    convert_to_url as convert_to_url,
    publish as publish,
)
from .transfer.repair import repair as repair
from .verification.checks import Finding as Finding, Report as Report
from .verification.verify import verify as verify
