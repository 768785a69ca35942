"""Into TensorFlow: queues, stages and datasets of the batches of a loader, a flow or any iterable."""

import lazy_loader

import shardprep.loaders.frameworks.tensors  # noqa: F401 - raises MissingExtra without TensorFlow

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
