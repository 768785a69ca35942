"""The terms that all senders of one receiver must have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from shardprep.formats.errors import UsageError

UNKNOWN = -1  # a number of steps or records
MAX_DIFFERENCES = 16  # in a message
MAX_NAME_CHARACTERS = 40
MAX_PARTS = 1 << 16

Facts = dict[str, str]


@dataclass(frozen=True)
class SourceTerms:
    """``facts`` are the values that determine the batches, by name.

    ``steps`` is the number of steps of a pass, ``records`` what a receipt of a whole pass counts; both may be
    UNKNOWN. Where ``picks`` is true, steps can be made in any order, and their number is known. Where there
    are more ``parts`` than one, step n is of part n % ``parts``, and the steps of a part are made in order.
    Equal by value.
    """

    facts: Facts
    steps: int
    records: int
    picks: bool
    parts: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError where a value is not valid."""
        whole = all(type(n) is int and n >= UNKNOWN for n in (self.steps, self.records))
        whole = whole and type(self.parts) is int and 1 <= self.parts <= MAX_PARTS
        texts = isinstance(self.facts, dict) and all(isinstance(x, str) for x in self.facts.values())
        if not (whole and texts and self.dataset and type(self.picks) is bool):
            raise UsageError("these are not valid terms of a source")
        if self.picks and self.steps == UNKNOWN:
            raise UsageError("steps can be made in any order only where their number is known")

    @property
    def dataset(self) -> str:
        """The dataset that receipts name."""
        return self.facts.get("dataset") or self.facts.get("identity", "")

    def difference(self, expected: SourceTerms) -> str:
        """Return a text that lists how these differ from the expected ones, "" where they are equal."""
        actual, wanted = self._named(), expected._named()
        return _difference(actual, wanted, [*{**wanted, **actual}])

    def missing(self, expected: Facts) -> str:
        """Return a text that lists which of the expected facts differ here, "" where none does."""
        return _difference(self._named(), expected, [*expected])

    def _named(self) -> Facts:
        numbers = {"steps": self.steps, "records": self.records, "any order": self.picks, "parts": self.parts}
        return self.facts | {name: str(value) for name, value in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what ``to_json`` returned. Raises UsageError for anything else."""
        if not isinstance(value, Mapping) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError("these are not valid terms of a source")
        return cls(**value)


def _difference(actual: Facts, expected: Facts, names: Sequence[str]) -> str:
    differing = [name for name in names if actual.get(name) != expected.get(name)]
    listed = [
        f"{name[:MAX_NAME_CHARACTERS]} is {_short(actual.get(name))} instead of {_short(expected.get(name))}"
        for name in differing[:MAX_DIFFERENCES]
    ]
    if len(differing) > MAX_DIFFERENCES:
        listed.append(f"and {len(differing) - MAX_DIFFERENCES} more")
    return "; ".join(listed)


def _short(value: str | None) -> str:
    return "not given" if value is None else repr(value[:100])
