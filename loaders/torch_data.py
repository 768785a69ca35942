"""Batches as PyTorch tensors over the loader's own memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardprep.formats.errors import MissingExtra, UsageError
from shardprep.formats.runtime.owners import Owner, not_copyable_error
from shardprep.loaders.batches.passes import Source
from shardprep.loaders.batches.slots import NUMBERS
from shardprep.loaders.batches.stack import Conversion

if TYPE_CHECKING:
    from shardprep.loaders import Flow, Loader

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.torch_data", "PyTorch", "torch") from error


class TorchBatches(Owner, Conversion, IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """The ``IterableDataset`` that :func:`to_torch` returns. Not copyable, picklable or thread-safe."""

    copy_advice = (
        "it works in the training process only, because the Loader has worker processes of its own: give the "
        "DataLoader num_workers=0"
    )

    def __init__(self, source: Source) -> None:
        super().__init__(source, tensor_of)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Raises UsageError in a DataLoader's worker, or if one would batch batches."""
        if get_worker_info() is not None:
            raise not_copyable_error(self, self.copy_advice)
        # Only a DataLoader's fetcher knows whether it batches. The variables of no other caller are read,
        # because its frame would then keep them, such as batches.
        caller = sys._getframe(1)
        if (
            hasattr(type(self.source), "batch_specs")
            and caller.f_globals.get("__name__") == "torch.utils.data._utils.fetch"
            and getattr(caller.f_locals.get("self"), "auto_collation", False)
        ):
            raise UsageError(
                "a Loader delivers whole batches, of its own batch_size: give the DataLoader batch_size=None"
            )
        return super().__iter__()


class ResumableTorchBatches(TorchBatches):
    """A dataset over a source with a state, for torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any:
        """Return the source's state; the batches delivered so far count as done."""
        return self.source.state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state: Any, **options: Any) -> None:
        """Make the next iteration continue where the state was taken; options and errors are the source's."""
        self.source.load_state_dict(state, **options)  # type: ignore[union-attr]


@overload
def to_torch(source: Loader | Flow) -> ResumableTorchBatches: ...
@overload
def to_torch(source: Source) -> TorchBatches: ...
def to_torch(source: Source) -> TorchBatches:
    """Return an ``IterableDataset`` over ``source``; each iteration is one epoch.

    ``source`` is a Loader, an iterable or a function that returns an iterable. The dataset delivers whole
    batches: iterate it, or give it to ``DataLoader(dataset, batch_size=None)`` with ``num_workers=0``,
    because a Loader has worker processes of its own. In a DataLoader's worker process, iterating raises
    UsageError, as it does for a DataLoader with another ``batch_size`` over a Loader or FakeData.

    Arrays become tensors over the same memory: a Loader's slot stays in use while any tensor on it is held.
    Arrays that are read-only, of foreign byte order, unaligned or of strides that torch does not support are
    copied once; a Loader's never are. Memoryviews (a Loader's encoded images) become uint8 tensors over the
    same memory, because a DataLoader treats them as sequences of numbers. Tuples, lists and dicts are kept;
    bytes, strings and objects are not changed.

    The dataset has ``state_dict`` and ``load_state_dict`` if the source has them. Errors of the source are
    raised unchanged. Not picklable; one iteration of a Loader at a time.
    """
    resumable = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    return (ResumableTorchBatches if resumable else TorchBatches)(source)


def tensor_of(part: Any) -> Any:
    """Return a tensor over an array or memoryview of numbers; return anything else unchanged."""
    array = np.asarray(part) if isinstance(part, memoryview) else part
    if not isinstance(array, np.ndarray) or array.dtype.kind not in NUMBERS:
        return part
    whole_steps = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not (array.flags.writeable and array.flags.aligned and array.dtype.isnative and whole_steps):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)
