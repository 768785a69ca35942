"""Turn image archives into verified shards, and feed them to training.

Offline: ``convert`` archives into shards, ``verify`` and ``repair`` them; ``open_dataset`` reads single
records, and ``export`` writes them for other loaders. Online: a ``Loader`` gives batches of a dataset,
decoded in processes by a ``TrainTransform`` or an ``EvalTransform``, in the order of a ``LocalShuffle`` or
``GlobalShuffle``; a ``Flow`` composes other data. ``to_torch``, ``to_jax``, ``to_dataset``, ``QueueInput``
and ``StagingInput`` feed a framework, and ``serve`` and ``RemoteSource`` move batches between machines.

A name is imported when it is first used: importing this package costs next to nothing.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if _sys.platform != "linux":
    raise ImportError("shardprep needs Linux: WSL 2 on Windows, elsewhere a container or a virtual machine")

if TYPE_CHECKING:
    from shardprep.formats import *  # noqa: F403
    from shardprep.loaders import *  # noqa: F403
    from shardprep.loaders.jax_data import to_jax as to_jax
    from shardprep.loaders.measuring import measure as measure, tracing as tracing, watched as watched
    from shardprep.loaders.remote import (
        ReceiverKeys as ReceiverKeys,
        RemoteSource as RemoteSource,
        SenderKeys as SenderKeys,
        serve as serve,
    )
    from shardprep.loaders.tf_inputs import (
        BatchQueueInput as BatchQueueInput,
        DatasetInput as DatasetInput,
        DummyConstantInput as DummyConstantInput,
        FeedInput as FeedInput,
        QueueInput as QueueInput,
        StagingInput as StagingInput,
        TensorInput as TensorInput,
        ZMQInput as ZMQInput,
        to_dataset as to_dataset,
    )
    from shardprep.loaders.torch_data import to_torch as to_torch

    __version__: str
else:
    _PACKAGES = ("shardprep.formats", "shardprep.loaders")
    _MODULES = {
        "shardprep.loaders.jax_data": ["to_jax"],
        "shardprep.loaders.measuring": ["measure", "tracing", "watched"],
        "shardprep.loaders.remote": ["ReceiverKeys", "RemoteSource", "SenderKeys", "serve"],
        "shardprep.loaders.tf_inputs": [
            "BatchQueueInput",
            "DatasetInput",
            "DummyConstantInput",
            "FeedInput",
            "QueueInput",
            "StagingInput",
            "TensorInput",
            "ZMQInput",
            "to_dataset",
        ],
        "shardprep.loaders.torch_data": ["to_torch"],
    }
    """Names that ``import *`` leaves out, because some of their modules need an extra."""
    _FRAMEWORKS = {
        "shardprep.loaders.jax_data": "jax",
        "shardprep.loaders.tf_inputs": "tensorflow",
        "shardprep.loaders.torch_data": "torch",
    }

    def __getattr__(name):
        if name == "__all__":
            value = ["__version__", *sorted(set().union(*(_import_module(one).__all__ for one in _PACKAGES)))]
        elif name == "__version__":
            value = _import_module("importlib.metadata").version("shardprep")
        else:
            value = _find(name)
        globals()[name] = value
        return value

    def _find(name):
        for module, names in _MODULES.items():
            if name in names:
                return getattr(_import_module(module), name)
        if not name.startswith("_"):
            for package in map(_import_module, _PACKAGES):
                if name in package.__all__:
                    return getattr(package, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        find_spec = _import_module("importlib.util").find_spec
        there = [_MODULES[one] for one in _MODULES if find_spec(_FRAMEWORKS.get(one, "shardprep"))]
        return sorted(set(__getattr__("__all__")).union(*there))
