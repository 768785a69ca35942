"""Items from nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ...formats.errors import UsageError
from ..fake_data import FakeData
from .length import Length, exact
from .node import Fetched
from .running import Pass
from .seconds import seconds_of
from .whole import seed_of, whole, within


@dataclass(frozen=True)
class FromFakeData(Fetched):
    """The items of batches of one. See :meth:`.Flow.fake`."""

    data: FakeData

    def __post_init__(self) -> None:
        if self.data.batch_specs[0].shape[0] != 1:
            raise UsageError("fake items are those of batches of one; give FakeData batch_size=1")

    @classmethod
    def of(cls, items: int, *, size: tuple[int, int], encoded: bool, seconds: float, seed: int) -> Self:
        """Raises UsageError."""
        return cls(
            FakeData(
                whole(items, "the number of items", least=0),
                batch_size=1,
                size=size,
                encoded=encoded,
                seconds=seconds_of(seconds, "what an item costs"),
                seed=seed_of(seed),
            )
        )

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


@dataclass(frozen=True)
class FakeItems:
    """Makes items of their numbers, each costing the seconds that ``data`` says."""

    data: FakeData

    @contextmanager
    def open(self) -> Iterator[Callable[[int], tuple[Any, int]]]:
        yield self._item

    def _item(self, number: int) -> tuple[Any, int]:
        (image,), labels = self.data.batch(number)
        return image.obj if isinstance(image, memoryview) else image, labels.item()
