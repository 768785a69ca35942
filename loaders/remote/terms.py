"""What all who serve one receiver must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...formats.errors import UsageError

UNKNOWN = -1  # a number of steps or records
MAX_NAMED = 16  # differences that are told
MAX_NAME = 40  # characters

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
        return _difference(ours, theirs, [*{**theirs, **ours}])

    def lacks(self, expected: Facts) -> str:
        """Which of the facts expected are others here, in words; "" where none is."""
        return _difference(self._named(), expected, [*expected])

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


def _difference(ours: Facts, theirs: Facts, names: Sequence[str]) -> str:
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    told = [
        f"{name[:MAX_NAME]} is {_short(ours.get(name))} instead of {_short(theirs.get(name))}"
        for name in differing[:MAX_NAMED]
    ]
    if len(differing) > MAX_NAMED:
        told.append(f"and {len(differing) - MAX_NAMED} more")
    return "; ".join(told)


def _short(value: str | None) -> str:
    return "not told" if value is None else repr(value[:100])
