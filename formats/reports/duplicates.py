"""Finds images that occur twice, byte for byte or nearly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.shards.read import Rows

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def near_pairs(hashes: Hashes, distance: int) -> Iterator[Numbers]:
    """Yield all pairs of ``hashes`` that differ in at most ``distance`` bits, each once.

    A pair is (i, j) with i < j; each array yielded is int64 [n, 2]. The bits are divided into two more bands
    than ``distance``. Two hashes within the distance are equal in at least two bands, so only hashes equal in
    two bands are compared; a pair is yielded for the first two. Needs a few times the memory of ``hashes``,
    or more if very many are equal in two bands.
    """
    bands = distance + 2  # of every n-th bit, so that each has coarse and fine structure
    band_masks = [sum(1 << bit for bit in range(band, 64, bands)) for band in range(bands)]
    masks = [np.uint64(a | b) for a, b in combinations(band_masks, 2)]
    for number, mask in enumerate(masks):
        for first, second in _near_under(hashes, mask, distance):
            differing = hashes[first] ^ hashes[second]
            is_new = np.ones(len(differing), bool)
            for earlier in masks[:number]:
                is_new &= (differing & earlier) != 0
            if is_new.any():
                yield np.sort(np.stack([first[is_new], second[is_new]], axis=1), axis=1)


def _near_under(hashes: Hashes, mask: np.uint64, distance: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the indexes of near hashes that are equal under a mask: adjacent ones, then two apart, ..."""
    masked = hashes & mask
    order = np.argsort(masked, kind="stable")
    ordered, left = hashes[order], _left_in_run(masked[order])
    at, apart = np.arange(len(order)), 1
    while len(at := at[left[at] > apart]):
        is_near = np.bitwise_count(ordered[at] ^ ordered[at + apart]) <= distance
        if is_near.any():
            near = at[is_near]
            yield order[near], order[near + apart]
        apart += 1


def _left_in_run(values: Hashes) -> Numbers:
    """Return for each sorted value how many equal ones follow, itself included.

    >>> _left_in_run(np.array([5, 5, 5, 7], np.uint64)).tolist()
    [3, 2, 1, 1]
    """
    begins = np.flatnonzero(_is_new(values))
    lengths = np.diff(np.append(begins, len(values)))
    return np.repeat(begins + lengths, lengths) - np.arange(len(values))


DISTANCE = 4  # largest number of 64 bits in which images that look alike differ
MAX_NEAR = 100_000  # links between images that look alike; the frames of a video have far more
EQUAL_BYTES = -1

LINK = np.dtype([("first", "<i8"), ("second", "<i8"), ("distance", "<i2")])
"""Two records, and the number of bits in which their hashes differ; EQUAL_BYTES if their bytes are equal."""

Links = npt.NDArray[np.void]


@dataclass(frozen=True)
class Duplicates:
    """The duplicates among images that were read.

    ``links`` are rows of LINK: equal bytes first, then by distance and record. Images that look alike have
    hashes that differ in at most DISTANCE bits. n images with equal bytes, or with the same hash, have at
    most 2 n links: from each to the next by label and record, and to one with another label, if there is one.
    ``is_bounded`` is whether near links beyond MAX_NEAR were dropped.
    """

    links: Links
    is_bounded: bool

    @property
    def exact(self) -> Links:
        links: Links = self.links[self.links["distance"] == EQUAL_BYTES]
        return links

    @property
    def near(self) -> Links:
        links: Links = self.links[self.links["distance"] != EQUAL_BYTES]
        return links

    @classmethod
    def within(cls, codes: Rows, labels: Numbers) -> Self:
        """Return the duplicates among the images of ``codes``, rows of CODES; records have ``labels``."""
        codes = codes[np.argsort(codes["record"])]
        hashed = _by_hash(codes[np.unique(codes["digest"], return_index=True)[1]])
        near, is_bounded = _near_links(_first_of_each(hashed), None)
        exact = _equal_links(codes, "digest", labels, EQUAL_BYTES)
        same = _equal_links(hashed, "hash", labels, 0)
        return cls(_sort_links([exact, same, near]), is_bounded)

    @classmethod
    def across(cls, codes: Rows, others: Rows) -> Self:
        """Return the links from images of ``codes`` to those of ``others``; all record numbers must differ.

        Each image of ``codes`` is linked to the first of ``others`` with its bytes, or else with its hash,
        and to the first image of each other hash within DISTANCE bits.
        """
        exact = _first_equal_links(codes, others, "digest", EQUAL_BYTES)
        mine, theirs = _by_hash(codes), _by_hash(others)
        same = _first_equal_links(mine, _first_of_each(theirs), "hash", 0)
        same = same[~np.isin(same["first"], exact["first"])]
        both = np.concatenate([_first_of_each(mine), _first_of_each(theirs)])
        near, is_bounded = _near_links(both, len(_first_of_each(mine)))
        near, is_cut = _repeat_for_hash(near, mine)
        return cls(_sort_links([exact, same, near]), is_bounded or is_cut)


def _equal_links(codes: Rows, column: str, labels: Numbers, distance: int) -> Links:
    """Return links between rows with equal values in a column."""
    own = labels[codes["record"]]
    order = np.lexsort((codes["record"], own, codes[column]))
    values, records, own = codes[column][order], codes["record"][order], own[order]
    at, is_new = np.arange(len(order)), _is_new(values)
    lasts = np.append(np.flatnonzero(is_new)[1:], [len(at)])[np.cumsum(is_new) - 1] - 1
    before = np.maximum.accumulate(np.where(is_new | _is_new(own), at - 1, 0))  # the label begins after it
    others = np.where(own != own[lasts], lasts, np.maximum(before, 0))
    is_other = (values == values[others]) & (own != own[others])
    first, second = np.append(at[:-1], others), np.append(at[1:], at)
    is_linked = np.append(~is_new[1:], is_other)
    return _make_links(records[first[is_linked]], records[second[is_linked]], distance)


def _is_new(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that differ from the one before."""
    return np.append([True], values[1:] != values[:-1])[: len(values)]


def _first_equal_links(codes: Rows, others: Rows, column: str, distance: int) -> Links:
    """Return links from rows of ``codes`` to the first row of ``others`` with an equal value in a column."""
    others = others[np.lexsort((others["record"], others[column]))]
    if not len(others):
        return np.empty(0, LINK)
    at = np.minimum(np.searchsorted(others[column], codes[column]), len(others) - 1)
    is_equal = others[column][at] == codes[column]
    return _make_links(codes["record"][is_equal], others["record"][at[is_equal]], distance)


def _by_hash(codes: Rows) -> Rows:
    hashed = codes[codes["is_hashed"]]
    ordered: Rows = hashed[np.lexsort((hashed["record"], hashed["hash"]))]
    return ordered


def _first_of_each(hashed: Rows) -> Rows:
    """Return the first row of each hash, from rows sorted by hash."""
    firsts: Rows = hashed[np.unique(hashed["hash"], return_index=True)[1]]
    return firsts


def _near_links(hashed: Rows, boundary: int | None) -> tuple[Links, bool]:
    """Return links of near hashes, only across a ``boundary`` if given, and whether some were dropped."""
    parts, count = [np.empty(0, LINK)], 0
    hashes, records = np.ascontiguousarray(hashed["hash"]), hashed["record"]
    for pairs in near_pairs(hashes, DISTANCE):
        first, second = pairs.T
        distance = np.bitwise_count(hashes[first] ^ hashes[second])
        is_link = distance > 0
        if boundary is not None:
            is_link &= (first < boundary) & (second >= boundary)
        parts.append(_make_links(records[first[is_link]], records[second[is_link]], distance[is_link]))
        if (count := count + len(parts[-1])) > MAX_NEAR:
            break
    return np.concatenate(parts)[:MAX_NEAR], count > MAX_NEAR


def _repeat_for_hash(links: Links, hashed: Rows) -> tuple[Links, bool]:
    """Repeat each link for all rows with the hash of its ``first``; also return whether some were dropped."""
    _, starts, counts = np.unique(hashed["hash"], return_index=True, return_counts=True)
    firsts = hashed["record"][starts]
    order = np.argsort(firsts)
    group = order[np.searchsorted(firsts, links["first"], sorter=order)]
    until = np.cumsum(counts[group])
    fits = until <= MAX_NEAR
    links, group, until = links[fits], group[fits], until[fits]
    repeated = np.repeat(links, counts[group])
    place = np.arange(len(repeated)) - np.repeat(until - counts[group], counts[group])
    repeated["first"] = hashed["record"][np.repeat(starts[group], counts[group]) + place]
    return repeated, not fits.all()


def _make_links(first: Numbers, second: Numbers, distance: int | npt.NDArray[np.uint8]) -> Links:
    links = np.empty(len(first), LINK)
    links["first"], links["second"] = np.minimum(first, second), np.maximum(first, second)
    links["distance"] = distance
    return links


def _sort_links(parts: list[Links]) -> Links:
    links = np.concatenate(parts)
    links = links[np.lexsort((links["second"], links["first"], links["distance"]))]
    return links[_is_new(links)]
