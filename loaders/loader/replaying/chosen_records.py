"""The records that a run chose, as its card has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.displaced_order import MAX_RECORDS, Records
from shardprep.loaders.order.receipt import natural

MOST_LISTED = 4096


@dataclass(frozen=True)
class ChosenRecords:
    """A ``count`` of records, the ``digest`` of their numbers, and the ``numbers`` if they are few."""

    count: int
    digest: str
    numbers: tuple[int, ...] | None

    @classmethod
    def of(cls, numbers: Records, digest: str) -> Self:
        """Return the choice of these record numbers; more than MOST_LISTED are not listed."""
        listed = tuple(numbers.tolist()) if len(numbers) <= MOST_LISTED else None
        return cls(len(numbers), digest, listed)

    def given(self) -> Records:
        """Return the record numbers, int64. Raises UsageError where they are not listed."""
        if self.numbers is None:
            raise UsageError(f"the run chose {self.count} records, which its card does not list; give them")
        return np.array(self.numbers, np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        numbers = None if self.numbers is None else list(self.numbers)
        return {"count": self.count, "digest": self.digest, "numbers": numbers}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the choice that ``to_json`` described. Raises KeyError, TypeError or ValueError."""
        numbers, digest = value["numbers"], value["digest"]
        if not isinstance(digest, str):
            raise ValueError(f"{digest!r} is no digest")
        listed = None if numbers is None else tuple(map(natural, numbers))
        if listed is not None and (len(listed) > MOST_LISTED or max(listed, default=0) >= MAX_RECORDS):
            raise ValueError("it lists too many records, or too large numbers")
        return cls(natural(value["count"]), digest, listed)
