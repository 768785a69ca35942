from .frameworks.keras import InputMonitor as InputMonitor
from .frameworks.tf_feeding import InputFailed as InputFailed, original_errors as original_errors
from .frameworks.tf_inputs import (
    BatchQueueInput as BatchQueueInput,
    DatasetInput as DatasetInput,
    DummyConstantInput as DummyConstantInput,
    FeedInput as FeedInput,
    Input as Input,
    QueueInput as QueueInput,
    StagingInput as StagingInput,
    TensorInput as TensorInput,
    ZMQInput as ZMQInput,
    to_dataset as to_dataset,
)
from .frameworks.tf_stats import InputStats as InputStats
