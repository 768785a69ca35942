"""Into TensorFlow: queues, stages and datasets of the batches of a loader, a flow or any iterable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardprep.loaders.frameworks.keras import InputMonitor
from shardprep.loaders.frameworks.tf_feeding import InputFailed, original_errors
from shardprep.loaders.frameworks.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    DummyConstantInput,
    FeedInput,
    Input,
    QueueInput,
    StagingInput,
    TensorInput,
    ZMQInput,
    to_dataset,
)
from shardprep.loaders.frameworks.tf_stats import InputStats

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
        from shardprep.loaders.frameworks.keras import InputMonitor  # importing Keras takes a second

        return InputMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
