"""What all who serve one receiver must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...formats.errors import UsageError

UNKNOWN = -1  # a number of steps or records

Facts = dict[str, str]


@dataclass(frozen=True)
class Terms:
    """``facts`` are what decides the batches, by name.

    ``steps`` of a pass may be UNKNOWN; ``records`` are what a receipt of a whole pass counts, UNKNOWN where nobody
    knows. Where ``picks``, steps can be made in any order; then their number is known. Equal by value.
    """

    facts: Facts
    steps: int
    records: int
    picks: bool

    def __post_init__(self) -> None:
        """Raises UsageError."""
        whole = all(type(n) is int and n >= UNKNOWN for n in (self.steps, self.records))
        texts = isinstance(self.facts, dict) and all(isinstance(x, str) for x in self.facts.values())
        if not (whole and texts and self.dataset and type(self.picks) is bool):
            raise UsageError("these are no terms of a wire")
        if self.picks and self.steps == UNKNOWN:
            raise UsageError("steps can be made in any order only where their number is known")

    @property
    def dataset(self) -> str:
        """What receipts are of."""
        return self.facts.get("dataset") or self.facts.get("identity", "")

    def difference(self, expected: Terms) -> str:
        """How they differ from those expected, in words for both sides; "" where they do not."""
        ours, theirs = self._named(), expected._named()
        names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        return "; ".join(f"{n} is {_short(ours.get(n))} instead of {_short(theirs.get(n))}" for n in names)

    def _named(self) -> Facts:
        numbers = {"steps": self.steps, "records": self.records, "any order": self.picks}
        return self.facts | {name: str(value) for name, value in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Raises UsageError for what ``to_json`` did not give."""
        if not isinstance(value, Mapping) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError("these are no terms of a wire")
        return cls(**value)


def _short(value: str | None) -> str:
    return "not told" if value is None else repr(value[:100])
