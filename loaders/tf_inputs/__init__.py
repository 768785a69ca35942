"""Into TensorFlow: queues, stages and datasets of what a loader, a flow or any iterable yields."""

from typing import TYPE_CHECKING, Any

from shardprep.loaders.tf_inputs.feeding.errors import InputFailed, original_errors
from shardprep.loaders.tf_inputs.feeding.stats import InputStats

from .dataset_input import DatasetInput
from .feed_input import FeedInput
from .input import Input
from .queue_input import BatchQueueInput, QueueInput
from .staging_input import StagingInput
from .tensor_input import DummyConstantInput, TensorInput
from .to_dataset import to_dataset
from .zmq_input import ZMQInput

if TYPE_CHECKING:
    from .keras_monitor import InputMonitor

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
    """Import InputMonitor on first use, because it needs Keras."""
    if name == "InputMonitor":
        from .keras_monitor import (  # importing Keras takes a second
            InputMonitor,
        )

        return InputMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
