"""Into TensorFlow: queues, stages and datasets of what a loader, a flow or any iterable yields."""

from typing import TYPE_CHECKING, Any

from .dataset import to_dataset
from .dataset_input import DatasetInput
from .failures import InputFailed, original_errors
from .feed_input import FeedInput
from .input import Input
from .occupancy import InputStats
from .queue_input import BatchQueueInput, QueueInput
from .staging_input import StagingInput
from .tensor_input import DummyConstantInput, TensorInput
from .zmq_input import ZMQInput

if TYPE_CHECKING:
    from .monitor import InputMonitor

__all__ = [
    "BatchQueueInput",
    "DatasetInput",
    "DummyConstantInput",
    "FeedInput",
    "Input",
    "InputFailed",
    "InputMonitor",
    "InputStats",
    "QueueInput",
    "StagingInput",
    "TensorInput",
    "ZMQInput",
    "original_errors",
    "to_dataset",
]


def __getattr__(name: str) -> Any:
    """InputMonitor only when it is asked for, because it needs Keras, which takes a second to import."""
    if name == "InputMonitor":
        from .monitor import InputMonitor

        return InputMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
