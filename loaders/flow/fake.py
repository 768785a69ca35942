"""Items from nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...formats.errors import UsageError
from ..fake_data import FakeData
from .length import Length, exact
from .node import Fetched
from .running import Pass
from .whole import within


@dataclass(frozen=True)
class FromFakeData(Fetched):
    """The items of batches of one. See :meth:`.Flow.fake`."""

    data: FakeData

    def __post_init__(self) -> None:
        if self.data.batch_specs[0].shape[0] != 1:
            raise UsageError("fake items are those of batches of one; give FakeData batch_size=1")

    @property
    def length(self) -> Length:
        return exact(len(self.data))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> FakeItems:
        return FakeItems(self.data)

    def keys(self, now: Pass, numbers: Iterable[int]) -> Iterator[int]:
        return within(numbers, self.length)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (FromFakeData, len(self.data), _options(self.data))


@dataclass(frozen=True)
class FakeItems:
    """Makes items of their numbers, each costing the seconds that ``data`` says."""

    data: FakeData

    @contextmanager
    def open(self) -> Iterator[Callable[[int], tuple[Any, int]]]:
        yield self._item

    def _item(self, number: int) -> tuple[Any, int]:
        time.sleep(self.data._seconds)
        (image,), (label,) = self.data._images(number), self.data._labels_of(number).tolist()
        return image.obj if isinstance(image, memoryview) else image, label

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (FakeItems, len(self.data), _options(self.data))


def _options(data: FakeData) -> dict[str, Any]:
    size, encoded = data._shape[:2], data._encoded
    return {"size": size, "encoded": encoded, "seconds": data._seconds, "seed": data._rng_seed}


def _rebuilt(kind: Callable[[FakeData], Any], items: int, options: dict[str, Any]) -> Any:
    return kind(FakeData(items, batch_size=1, **options))
