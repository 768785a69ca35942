from .batches.slots import SlotsHeld as SlotsHeld
from .engine.dispatcher import SlowRecord as SlowRecord
from .engine.engine import EngineStats as EngineStats
from .engine.messages import WorkFailed as WorkFailed
from .flow.flow import FakeData as FakeData, Flow as Flow
from .loader.loader import Loader as Loader
from .loader.replay import (
    ContactSheet as ContactSheet,
    Parting as Parting,
    Replayed as Replayed,
    ReplayedRecord as ReplayedRecord,
)
from .loader.run_card import RunCard as RunCard
from .loader.run_log import RunProof as RunProof, prove as prove
from .loader.stats import LoaderStats as LoaderStats, StageLoad as StageLoad, Verdict as Verdict
from .order.epoch import GlobalShuffle as GlobalShuffle, LocalShuffle as LocalShuffle
from .order.quality import ShuffleQuality as ShuffleQuality, SortedByClass as SortedByClass
from .order.receipt import Receipt as Receipt
from .transforms.contract import (
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    ArraySpec as ArraySpec,
    Transform as Transform,
    TransformInput as TransformInput,
)
from .transforms.decode import decode_rgb as decode_rgb
from .transforms.geometry import ShownPart as ShownPart
from .transforms.transforms import (
    ColorJitter as ColorJitter,
    Cut as Cut,
    EvalTransform as EvalTransform,
    TrainTransform as TrainTransform,
)
from .transforms.views import Views as Views
