"""A source of generated items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from shardprep.formats.errors import UsageError
from shardprep.loaders.fake.fake_data import FakeData
from shardprep.loaders.flow.core.checks import checked_int, seconds_of, seed_of, within
from shardprep.loaders.flow.core.length import Length, exact
from shardprep.loaders.flow.core.node import Fetched, described
from shardprep.loaders.flow.core.pass_context import PassContext


@dataclass(frozen=True)
class FromFakeData(Fetched):
    """The rows of fake batches of size 1. See :meth:`.Flow.fake`."""

    data: FakeData

    def __post_init__(self) -> None:
        if self.data.batch_specs[0].shape[0] != 1:
            raise UsageError("fake items are the rows of batches of size 1; give FakeData batch_size=1")

    @classmethod
    def of(cls, items: int, *, size: tuple[int, int], encoded: bool, seconds: float, seed: int) -> Self:
        """Return the source of ``items`` items. Raises UsageError."""
        return cls(
            FakeData(
                checked_int(items, "the number of items", least=0),
                batch_size=1,
                size=size,
                encoded=encoded,
                seconds=seconds_of(seconds, "what an item costs"),
                seed=seed_of(seed),
            )
        )

    @property
    def label(self) -> str:
        return "fake"

    @property
    def description(self) -> str:
        return described(self, str(self.length))

    @property
    def length(self) -> Length:
        return exact(len(self.data))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> FakeItems:
        return FakeItems(self.data)

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[int]:
        return within(numbers, self.length)


@dataclass(frozen=True)
class FakeItems:
    """Makes items from their numbers; each takes the time that ``data`` sets."""

    data: FakeData

    @contextmanager
    def open(self) -> Iterator[Callable[[int], tuple[Any, int]]]:
        yield self._item

    def _item(self, number: int) -> tuple[Any, int]:
        (image,), labels = self.data.batch(number)
        return image.obj if isinstance(image, memoryview) else image, labels.item()
