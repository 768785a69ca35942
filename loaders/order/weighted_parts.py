"""Parts of a dataset by weight: how many places of an epoch each has, and which records are at them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle
from typing import Self

import numpy as np

from shardprep.formats.errors import UsageError

from .displaced_order import Records


@dataclass(frozen=True)
class WeightedParts:
    """An epoch of as many places as there are records, of which each part has its share by weight.

    ``records`` are the parts' numbers of records, and ``places`` how many places of an epoch each has, one
    part after the other. A part's places of all epochs, one epoch after the other, go round its records in
    stored order: a part with more places than records repeats some, and one with fewer goes on in the next
    epoch where it stopped, so that every record comes equally often, but for one time.
    """

    records: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, weights: object, names: Sequence[str], records: Sequence[int]) -> Self:
        """Return the parts by their weights, a mapping from each of ``names`` to a number above 0.

        A part's places are its share of all, by largest remainder. Raises UsageError for other weights, and
        for one that gives a part no place.
        """
        if not isinstance(weights, Mapping) or set(weights) != set(names):
            raise UsageError(f"weights must be a dict with one number for each of {', '.join(names)}")
        shares = [_share(name, weights[name]) for name in names]
        places = shared_out(sum(records), shares)
        for name, count, own in zip(names, places, records, strict=True):
            if not count or not own:
                raise UsageError(
                    f"weights give no place of an epoch to {name}, which has {own} chosen records"
                )
        return cls(tuple(records), places)

    def positions(self, places: Records, epoch: int) -> Records:
        """Return which of all records, in stored order, are at these places of the epoch."""
        ends = np.cumsum(np.array(self.places, np.int64))
        parts = np.searchsorted(ends, places, side="right")
        own = np.array(self.records, np.int64)
        turns = [epoch * count % size for count, size in zip(self.places, self.records, strict=True)]
        begins = np.array(turns, np.int64) - ends + self.places
        inside: Records = places + begins[parts]
        inside %= own[parts]
        inside += (np.cumsum(own) - own)[parts]
        return inside

    def blocks(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return how many places an epoch reads together, from the records of each part's shards."""
        return tuple(
            block for own, places in zip(counts, self.places, strict=True) for block in _filled(own, places)
        )


def shared_out(total: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers that add up to ``total``, by largest remainder; of equals, the first has more."""
    quotas = [total * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_rest = sorted(range(len(quotas)), key=lambda at: counts[at] - quotas[at])
    for at in by_rest[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def _share(name: str, weight: object) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
        raise UsageError(f"the weight of {name} must be a number above 0, not {weight!r}")
    if not 0 < float(weight) < float("inf"):
        raise UsageError(f"the weight of {name} must be a number above 0, not {weight!r}")
    return Fraction(float(weight))


def _filled(counts: Sequence[int], places: int) -> list[int]:
    """Return counts, again from the first after the last, up to a sum of ``places``."""
    filled, done = list[int](), 0
    for count in cycle(each for each in counts if each):
        filled.append(min(count, places - done))
        done += filled[-1]
        if done == places:
            break
    return filled
