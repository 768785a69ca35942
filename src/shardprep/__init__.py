"""From the official archives of an image dataset to verified shards to the training step.

Offline: ``convert`` archives into shards, ``verify`` and ``repair`` them; ``open_dataset`` reads single
records, and ``export`` writes them for other loaders. Online: a ``Loader`` gives batches of a dataset,
decoded in processes by a ``TrainTransform`` or an ``EvalTransform``, in the order of a ``LocalShuffle`` or
``GlobalShuffle``; a ``Flow`` composes other data.
``shardprep.loaders.tf_inputs`` feeds TensorFlow, ``.torch_data`` and ``.jax_data`` other frameworks, and
``shardprep.loaders.remote`` takes batches from other machines.

A name is imported when it is first used: importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardprep.formats import *  # noqa: F403
    from shardprep.loaders import *  # noqa: F403

    __version__: str

_HOMES = ("shardprep.formats", "shardprep.loaders")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        value: Any = ["__version__", *sorted(set().union(*(import_module(home).__all__ for home in _HOMES)))]
    elif name == "__version__":
        value = import_module("importlib.metadata").version("shardprep")
    else:
        value = _found(name)
    globals()[name] = value
    return value


def _found(name: str) -> Any:
    if not name.startswith("_"):
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
