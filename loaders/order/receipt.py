"""Receipts: proof that an epoch delivered each record exactly once.

A digest is the sum, modulo 2**64 in each of two lanes, of a hash of every record number. It does not depend
on order, ranks or batch sizes, and the digests of parts add up to the digest of the whole. It misses an
accidental loss, repetition or mix-up with a probability of about 2**-128. It does not protect against an
attacker, who can construct other records with the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import parse_fields, parse_natural, to_json_value
from shardprep.formats.runtime.progress import check_int

VERSION = 1
T = TypeVar("T")
CHUNK_RECORDS = 1 << 16  # hashed at a time: 1 MB of lanes, which fits the CPU cache
MASK = (1 << 64) - 1

# SplitMix64 (Steele, Lea, Flood 2014) with the finaliser "variant 13". The lanes start at different places
# of its sequence: the first 128 fraction bits of pi.
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
LANES = np.array([[0x243F6A8885A308D3], [0x13198A2E03707344]], np.uint64)


@dataclass(frozen=True, slots=True)
class Tally:
    """A count of records and a digest of their numbers. Tallies of parts add up."""

    count: int = 0
    digest: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, records: npt.ArrayLike | range) -> Tally:
        """Return the tally of these record numbers; duplicates count."""
        numbers = np.asarray(records, np.int64).ravel()
        a = b = 0
        for start in range(0, len(numbers), CHUNK_RECORDS):
            lanes = numbers[start : start + CHUNK_RECORDS].astype(np.uint64) * INCREMENT + LANES
            lanes ^= lanes >> np.uint64(30)
            lanes *= MULTIPLIERS[0]
            lanes ^= lanes >> np.uint64(27)
            lanes *= MULTIPLIERS[1]
            lanes ^= lanes >> np.uint64(31)
            c, d = lanes.sum(axis=1, dtype=np.uint64).tolist()
            a, b = (a + c) & MASK, (b + d) & MASK
        return cls(len(numbers), (a, b))

    @classmethod
    @lru_cache(maxsize=4)  # the same for every epoch of a run
    def of_dataset(cls, records: int) -> Tally:
        """Return the tally of 0 .. records - 1, each once."""
        parts = (np.arange(i, min(i + CHUNK_RECORDS, records)) for i in range(0, records, CHUNK_RECORDS))
        return sum(map(cls.of, parts), cls())

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        digest = value["digest"]
        if not (isinstance(digest, str) and len(digest) == 32):
            raise ValueError(f"not a digest: {digest!r}")
        return cls(parse_natural(value["count"]), (int(digest[:16], 16), int(digest[16:], 16)))

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "digest": f"{self.digest[0]:016x}{self.digest[1]:016x}"}

    def __add__(self, other: Tally) -> Tally:
        (a, b), (c, d) = self.digest, other.digest
        return Tally(self.count + other.count, ((a + c) & MASK, (b + d) & MASK))


@dataclass(frozen=True)
class Receipt:
    """The record numbers that one epoch, or a part of it, delivered of one dataset.

    Attributes:
        dataset: Root of the dataset's manifest.
        epoch: Number of the epoch.
        delivered: Tally of the records that were delivered.
        skipped: Numbers of the bad records that were skipped.
        left_out: Tally of the records that ``drop_last`` left out, over all ranks; empty until the epoch
            ends.
        omitted: Tally of the records omitted on purpose, over all ranks, by ``without=`` or in skipped
            steps; empty until the epoch ends.
    """

    dataset: str
    epoch: int
    delivered: Tally = field(default_factory=Tally)
    skipped: tuple[int, ...] = ()
    left_out: Tally = field(default_factory=Tally)
    omitted: Tally = field(default_factory=Tally)

    def __repr__(self) -> str:
        omitted = f", {self.omitted.count:,} on purpose" if self.omitted.count else ""
        return (
            f"<Receipt of epoch {self.epoch}: {self.count:,} delivered, {len(self.skipped):,} skipped, "
            f"{self.left_out.count:,} left out{omitted}>"
        )

    @classmethod
    def of(cls, records: npt.ArrayLike | range, *, dataset: str, epoch: int) -> Receipt:
        """Return the receipt for these record numbers."""
        return cls(dataset, check_int(epoch, "epoch", least=0, most=(1 << 64) - 1), Tally.of(records))

    @property
    def count(self) -> int:
        """The number of records delivered, including repeated ones."""
        return self.delivered.count

    @property
    def is_complete(self) -> bool:
        """Whether nothing was skipped and nothing left out."""
        return not self.skipped and self.left_out.count == self.omitted.count == 0

    def add(self, records: npt.ArrayLike | range) -> Receipt:
        """Return this receipt with a delivered batch added."""
        return replace(self, delivered=self.delivered + Tally.of(records))

    def skip(self, records: Iterable[int]) -> Receipt:
        """Return this receipt with skipped bad records added."""
        return replace(self, skipped=tuple(sorted((*self.skipped, *map(int, records)))))

    def leave_out(self, records: npt.ArrayLike | range, *, omitted: Tally | None = None) -> Receipt:
        """Return this receipt for the end of an epoch that drops these records, over all ranks.

        ``omitted`` is the tally of the records omitted on purpose.
        """
        return replace(self, left_out=Tally.of(records), omitted=omitted or Tally())

    @classmethod
    def merge(cls, receipts: Iterable[Receipt]) -> Receipt:
        """Return the combined receipt of all ranks, or of all parts of a resumed epoch.

        Raises UsageError if they differ in dataset, epoch or the records left out.
        """
        parts = list(receipts)
        ends = {name: {getattr(part, name) for part in parts} - {Tally()} for name in ("left_out", "omitted")}
        return cls(
            dataset=_common_value("dataset", {part.dataset for part in parts}),
            epoch=_common_value("epoch", {part.epoch for part in parts}),
            delivered=sum((part.delivered for part in parts), Tally()),
            skipped=tuple(sorted(number for part in parts for number in part.skipped)),
            **{name: _common_value(name, tallies or {Tally()}) for name, tallies in ends.items()},
        )

    def check(self, records: int, *, left_out: int = 0, skipped: int = 0, omitted: int = 0) -> None:
        """Raise DataError unless records 0 .. records - 1 were each delivered exactly once.

        The other arguments are the numbers of records that ``drop_last`` left out, that were skipped as bad,
        and that were omitted on purpose. They must match, so ``check(n)`` passes only if n records were
        delivered; the error names the actual numbers.
        """
        rest = {"left_out": self.left_out.count, "skipped": len(self.skipped), "omitted": self.omitted.count}
        accounted = self.delivered + Tally.of(self.skipped) + self.left_out + self.omitted
        expected = {"records": records, "left_out": left_out, "skipped": skipped, "omitted": omitted}
        for name, number in expected.items():
            check_int(number, name, least=0)
        if expected == {"records": records, **rest} and accounted == Tally.of_dataset(records):
            return
        summary = (
            f"epoch {self.epoch} of {self.dataset} delivered {self.count:,} of {records:,} records: drop_last left out "
            f"{self.left_out.count:,}, {len(self.skipped):,} were skipped as bad, and {self.omitted.count:,} left out on purpose"
        )
        if accounted == Tally.of_dataset(records):
            arguments = "".join(f", {name}={count}" for name, count in rest.items() if count)
            raise DataError(f"{summary}; check({records}{arguments}) accepts that")
        missing = records - accounted.count
        repeated = f"some were delivered more than once, or there are more than {records:,} records"
        wrong = f"{missing:,} or more are missing" if missing > 0 else repeated
        raise DataError(
            f"{summary}; so {wrong}. Check an epoch at its end; merge the receipts, or give the logs, of all ranks, each "
            "once, and of all parts of a resumed epoch"
        )

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types, which :meth:`from_json` reads."""
        values = {field.name: to_json_value(getattr(self, field.name)) for field in fields(self)}
        if not self.omitted.count:  # releases before 0.4 do not know it
            del values["omitted"]
        return {"version": VERSION} | values

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Receipt:
        """Return the receipt that ``to_json`` described. Raises DataError or UnknownVersion."""
        try:
            if value["version"] != VERSION:
                raise UnknownVersion(f"has a receipt of version {value['version']!r}, not {VERSION}")
            receipt = cls(**parse_fields(cls, {"omitted": to_json_value(Tally())} | value))
            if max(receipt.skipped, default=0) >= 1 << 63:
                raise ValueError("its record numbers are too large")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a receipt: {error!r}") from error
        return receipt


def _common_value(name: str, values: set[T]) -> T:
    if len(values) != 1:
        differing = ", ".join(sorted(map(str, values))) or "none"
        raise UsageError(
            f"receipts can be merged only if they agree on {name}: {differing}; give those of one run, in which every "
            "rank skipped the same steps"
        )
    return values.pop()
