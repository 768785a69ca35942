"""A step that was made again: its records, and the batch that was delivered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.loaders.transforms.geometry.shown import ShownPart

DIGEST_BYTES = 16


@dataclass(frozen=True)
class ReplayedRecord:
    """One record of a step: its number in the dataset, its key and its label in the loader's label space.

    ``shown`` is the part of the image that the transform shows, None where the transform does not tell.
    ``skipped`` is the reason for which a bad record is not in the batch, None for the others.
    """

    number: int
    key: str
    label: int
    shown: ShownPart | None = None
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        shown = self.shown.to_json() if self.shown else {"crop": None, "mirrored": None}
        named = {"number": self.number, "key": self.key, "label": self.label}
        return {**named, **shown, "skipped": self.skipped}


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a rank got at a ``step`` of an ``epoch``.

    ``batch`` is bit for bit the tuple that was delivered; its arrays are in memory of their own. ``records``
    are those of the step in their order, with the bad ones that were skipped.
    """

    epoch: int
    step: int
    batch: tuple[Any, ...]
    records: tuple[ReplayedRecord, ...]

    @property
    def delivered(self) -> tuple[ReplayedRecord, ...]:
        """The records of the batch, one for each row."""
        return tuple(record for record in self.records if record.skipped is None)

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The record numbers of the rows: int64 [B]."""
        return np.array([record.number for record in self.delivered], np.int64)

    @property
    def keys(self) -> list[str]:
        """The keys of the rows."""
        return [record.key for record in self.delivered]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The labels of the rows: int64 [B]."""
        return np.array([record.label for record in self.delivered], np.int64)

    @property
    def skipped(self) -> tuple[ReplayedRecord, ...]:
        """The bad records that are not in the batch."""
        return tuple(record for record in self.records if record.skipped is not None)

    def digests(self) -> list[str]:
        """Return a digest of the values of each row, to compare between machines: 32 hex digits."""
        return [_digest(row) for row in self._rows()]

    def digest(self) -> str:
        """Return a digest of the values of the whole batch: 32 hex digits."""
        return _digest(self.digests())

    def first_difference(self, other: Replayed) -> int | None:
        """Return the first row with other values than in the other step; None where all are equal."""
        pairs = zip_longest(self.digests(), other.digests())
        return next((row for row, (one, two) in enumerate(pairs) if one != two), None)

    def _rows(self) -> Iterator[list[Any]]:
        for row in range(len(self)):
            yield [
                [value[row] for value in part.values()] if isinstance(part, dict) else part[row]
                for part in self.batch
            ]

    def __len__(self) -> int:
        return len(self.delivered)

    def __iter__(self) -> Iterator[ReplayedRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        bad = f", {len(self.skipped):,} skipped" if self.skipped else ""
        return f"<Replayed step {self.step} of epoch {self.epoch}: {len(self):,} records{bad}>"


def _digest(value: Any) -> str:
    """The digest of arrays, bytes and values of JSON, and of lists and dicts of them."""
    found = blake2b(digest_size=DIGEST_BYTES)
    if isinstance(value, dict):
        return _digest([part for item in value.items() for part in item])
    if isinstance(value, list | tuple):
        found.update("".join(map(_digest, value)).encode())
    elif isinstance(value, np.ndarray | np.generic):
        found.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
    else:
        found.update(value if isinstance(value, bytes | memoryview) else repr(value).encode())
    return found.hexdigest()
