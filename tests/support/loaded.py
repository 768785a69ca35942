"""The batches of a loader, kept and compared."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from support.loader_workers import Tagging

Kept = tuple[Any, ...]


# of all records in small batches, tagged in this thread and with numbers, by default
loader_on = partial(
    Loader,
    batch_size=10,
    transform=Tagging(),
    shuffle=LocalShuffle(60),
    workers=0,
    with_numbers=True,
    drop_last=False,
)
crops_on = partial(loader_on, transform=TrainTransform(24), workers=1)


def kept(batch: Sequence[Any]) -> Kept:
    """A copy that does not hold the batch's memory."""
    return tuple([own(x) for x in part] if isinstance(part, list) else part.copy() for part in batch)


def own(payload: Any) -> Any:
    if isinstance(payload, memoryview):
        return bytes(payload)
    return payload.copy() if isinstance(payload, np.ndarray) else payload


def epoch_of(batches: Iterable[Sequence[Any]], steps: int | None = None) -> list[Kept]:
    """The batches of an epoch, or so many of them."""
    return [kept(batch) for batch in islice(batches, steps)]


def numbers_in(batches: Iterable[Kept]) -> list[int]:
    """The record numbers of a loader ``with_numbers``."""
    return [int(number) for batch in batches for number in batch[-1]]


def assert_same(some: Sequence[Kept], others: Sequence[Kept]) -> None:
    """Check equality bit for bit, including dtypes and shapes."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert list(map(exact, one)) == list(map(exact, other))


def exact(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.dtype, part.shape, part.tobytes()
    return [exact(x) for x in part] if isinstance(part, list) else part


def assert_exactly_once(loader: Loader, batches: Sequence[Kept]) -> None:
    """Check that batches ``with_numbers`` have all records of the dataset, each once."""
    assert sorted(numbers_in(batches)) == list(range(len(loader.dataset)))
    loader.receipt().check(len(loader.dataset))
    assert loader.receipt().is_complete
