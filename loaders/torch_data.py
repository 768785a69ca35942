"""Into PyTorch: batches as tensors over the memory in which the loader made them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .conversion import NUMBERS, Conversion
from .passes import Source

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise ImportError("PyTorch is not installed; pip install 'shardprep[torch]'") from error


class TorchBatches(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """What :func:`to_torch` returns. Not picklable, not thread-safe."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self._batches = Conversion(source, tensor_of)

    def __len__(self) -> int:
        """How many batches the next iteration has. TypeError where the source does not know."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Raises UsageError in a DataLoader's worker process."""
        if get_worker_info() is not None:
            raise _in_a_worker()
        return iter(self._batches)

    def __reduce__(self) -> NoReturn:
        raise _in_a_worker()


class ResumableTorchBatches(TorchBatches):
    """The same over a source that can be stopped and gone on with, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> Any:
        """The source's state: what was delivered so far counts as done."""
        return self.source.state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state: Any) -> None:
        """Have the next iteration go on where the state was taken. Raises what the source raises."""
        self.source.load_state_dict(state)  # type: ignore[union-attr]


def to_torch(source: Source) -> TorchBatches:
    """An ``IterableDataset`` whose every iteration is one epoch of a Loader, an iterable or a function.

    It delivers whole batches: iterate it, or give it to ``DataLoader(dataset, batch_size=None)``, with
    ``num_workers=0``, because a Loader has worker processes of its own; more raise UsageError.

    Arrays become tensors over the same memory, and a tensor keeps it: a Loader's slot stays lent while any
    tensor on it is held. Arrays that are read-only, of foreign byte order, unaligned or of strides that
    torch does not know are copied once; a Loader's never are. Memoryviews (a Loader's encoded images) become
    uint8 tensors over the same memory, since a DataLoader takes them for sequences of numbers. Tuples, lists
    and dicts are kept; bytes, strings and objects stay as they are.

    Where the source has ``state_dict`` and ``load_state_dict``, so has the dataset. A source's error comes
    as itself. Not picklable; one iteration of a Loader at a time.
    """
    resumable = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    return (ResumableTorchBatches if resumable else TorchBatches)(source)


def tensor_of(part: Any) -> Any:
    """A tensor over an array or memoryview of numbers; anything else as it is."""
    array = np.asarray(part) if isinstance(part, memoryview) else part
    if not isinstance(array, np.ndarray) or array.dtype.kind not in NUMBERS:
        return part
    return torch.from_numpy(array if _can_be_shared(array) else _copied(array))


def _can_be_shared(array: npt.NDArray[Any]) -> bool:
    size = array.itemsize
    whole_steps = all(stride >= 0 and stride % size == 0 for stride in array.strides)
    return array.flags.writeable and array.flags.aligned and array.dtype.isnative and whole_steps


def _copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("="), order="C")


def _in_a_worker() -> UsageError:
    return UsageError(
        "to_torch's dataset works in the training process only, because the Loader has worker processes of "
        "its own: give the DataLoader num_workers=0"
    )
