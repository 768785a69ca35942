"""Images that a dataset has twice, byte for byte or nearly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.shards.files import Rows

BITS = 64
Hashes = npt.NDArray[np.uint64]
Pairs = npt.NDArray[np.int64]


def near_pairs(hashes: Hashes, distance: int) -> Iterator[Pairs]:
    """Yield all pairs of ``hashes`` that differ in at most ``distance`` bits, each pair once.

    A pair is (i, j) with i < j; each array yielded is int64 [n, 2]. The 64 bits are dealt to ``distance`` + 1
    bands: two hashes that differ in so few bits are equal in one of the bands at least, and only those are
    compared. A pair is yielded for the first band in which it is equal. Memory is a few times that of
    ``hashes``, unless very many are equal in a band."""
    bands = distance + 1  # of every n-th bit, so that coarse and fine structure is in each
    masks = [np.uint64(sum(1 << bit for bit in range(band, BITS, bands))) for band in range(bands)]
    for number, mask in enumerate(masks):
        for first, second in _near_in_band(hashes, mask, distance):
            differing = hashes[first] ^ hashes[second]
            is_new = np.ones(len(differing), bool)
            for earlier in masks[:number]:
                is_new &= (differing & earlier) != 0
            if is_new.any():
                yield np.sort(np.stack([first[is_new], second[is_new]], axis=1), axis=1)


def _near_in_band(
    hashes: Hashes, mask: np.uint64, distance: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the places of hashes that are equal under a mask and near: neighbours in order, then the next."""
    masked = hashes & mask
    order = np.argsort(masked, kind="stable")
    by_band, left = hashes[order], _left_in_run(masked[order])
    at, apart = np.arange(len(order)), 1
    while len(at := at[left[at] > apart]):
        is_near = np.bitwise_count(by_band[at] ^ by_band[at + apart]) <= distance
        if is_near.any():
            near = at[is_near]
            yield order[near], order[near + apart]
        apart += 1


def _left_in_run(values: Hashes) -> npt.NDArray[np.int64]:
    """Return for each of the sorted values how many equal ones begin with it.

    >>> _left_in_run(np.array([5, 5, 5, 7], np.uint64)).tolist()
    [3, 2, 1, 1]
    """
    begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    lengths = np.diff(np.append(begins, len(values)))
    return np.repeat(begins + lengths, lengths) - np.arange(len(values))


DISTANCE = 4  # bits of 64 in which images that look alike differ at most
MOST_NEAR = 100_000  # links between images that look alike; a video has no end of them
EQUAL_BYTES = -1

LINK = np.dtype([("first", "<i8"), ("second", "<i8"), ("distance", "<i2")])
"""Two records, and the bits in which their hashes differ, EQUAL_BYTES where their bytes are equal."""

Links = npt.NDArray[np.void]


@dataclass(frozen=True)
class Duplicates:
    """The duplicates among images that were read.

    ``links`` are rows of LINK, equal bytes first, then by distance and record. Of n images that are equal, or
    that have the same hash, there are n - 1 links, from each to the next; images that look alike have the
    same hash, or hashes that differ in up to DISTANCE bits. ``is_bounded`` is whether there are more than
    MOST_NEAR near links."""

    links: Links
    is_bounded: bool

    @property
    def exact(self) -> Links:
        """The links between images with equal bytes."""
        return _only(self.links, self.links["distance"] == EQUAL_BYTES)

    @property
    def near(self) -> Links:
        """The links between images that look alike."""
        return _only(self.links, self.links["distance"] != EQUAL_BYTES)


def duplicates(codes: Rows) -> Duplicates:
    """Return the duplicates among the images of ``codes``, rows of CODES."""
    codes = codes[np.lexsort((codes["record"], codes["digest"]))]
    is_equal = codes["digest"][1:] == codes["digest"][:-1]
    exact = _links(codes["record"][:-1][is_equal], codes["record"][1:][is_equal], EQUAL_BYTES)
    different = codes[np.concatenate([[True], ~is_equal])] if len(codes) else codes
    hashed = _by_hash(different)
    is_same = hashed["hash"][1:] == hashed["hash"][:-1]
    same = _links(hashed["record"][:-1][is_same], hashed["record"][1:][is_same], 0)
    near, is_bounded = _near(_first_of_each(hashed), None)
    return _sorted([exact, same, near], is_bounded)


def shared(codes: Rows, others: Rows) -> Duplicates:
    """Return the links from images of ``codes`` to those of ``others``, which have other record numbers.

    An image of ``codes`` has a link to the first of ``others`` with its bytes, or else with its hash, and one
    to the first of each hash that differs in up to DISTANCE bits.
    """
    exact = _equal(codes, others, "digest", EQUAL_BYTES)
    mine, theirs = _by_hash(codes), _by_hash(others)
    same = _equal(mine, _first_of_each(theirs), "hash", 0)
    same = same[~np.isin(same["first"], exact["first"])]
    both = np.concatenate([_first_of_each(mine), _first_of_each(theirs)])
    near, is_bounded = _near(both, len(_first_of_each(mine)))
    near, is_cut = _with_same_hash(near, mine)
    return _sorted([exact, same, near], is_bounded or is_cut)


def _equal(codes: Rows, others: Rows, column: str, distance: int) -> Links:
    """Return a link for each row of ``codes`` with an equal value in ``others``, to the first such."""
    others = others[np.lexsort((others["record"], others[column]))]
    if not len(others):
        return np.empty(0, LINK)
    at = np.minimum(np.searchsorted(others[column], codes[column]), len(others) - 1)
    found = others[column][at] == codes[column]
    return _links(codes["record"][found], others["record"][at[found]], distance)


def _by_hash(codes: Rows) -> Rows:
    hashed = codes[codes["is_hashed"]]
    ordered: Rows = hashed[np.lexsort((hashed["record"], hashed["hash"]))]
    return ordered


def _first_of_each(hashed: Rows) -> Rows:
    """Return the first of the rows with the same hash, of rows in the order of their hashes."""
    firsts: Rows = hashed[np.unique(hashed["hash"], return_index=True)[1]]
    return firsts


def _near(hashed: Rows, boundary: int | None) -> tuple[Links, bool]:
    """Return links of rows with different hashes, of a boundary those across, and whether there are more."""
    parts, count = [np.empty(0, LINK)], 0
    hashes, records = np.ascontiguousarray(hashed["hash"]), hashed["record"]
    for pairs in near_pairs(hashes, DISTANCE):
        first, second = pairs.T
        distance = np.bitwise_count(hashes[first] ^ hashes[second])
        kept = distance > 0
        if boundary is not None:
            kept &= (first < boundary) & (second >= boundary)
        parts.append(_links(records[first[kept]], records[second[kept]], distance[kept]))
        if (count := count + len(parts[-1])) > MOST_NEAR:
            break
    return np.concatenate(parts)[:MOST_NEAR], count > MOST_NEAR


def _with_same_hash(links: Links, hashed: Rows) -> tuple[Links, bool]:
    """Return the links, each for all rows with the hash of its ``first``, and whether there are more."""
    _, starts, counts = np.unique(hashed["hash"], return_index=True, return_counts=True)
    firsts = hashed["record"][starts]
    order = np.argsort(firsts)
    group = order[np.searchsorted(firsts, links["first"], sorter=order)]
    until = np.cumsum(counts[group])
    kept = until <= MOST_NEAR
    links, group, until = links[kept], group[kept], until[kept]
    made = np.repeat(links, counts[group])
    place = np.arange(len(made)) - np.repeat(until - counts[group], counts[group])
    made["first"] = hashed["record"][np.repeat(starts[group], counts[group]) + place]
    return made, not kept.all()


def _only(links: Links, mask: npt.NDArray[np.bool_]) -> Links:
    kept: Links = links[mask]
    return kept


def _links(
    first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], distance: int | npt.NDArray[np.uint8]
) -> Links:
    made = np.empty(len(first), LINK)
    made["first"], made["second"] = np.minimum(first, second), np.maximum(first, second)
    made["distance"] = distance
    return made


def _sorted(parts: list[Links], is_bounded: bool) -> Duplicates:
    links = np.concatenate(parts)
    order = np.lexsort((links["second"], links["first"], links["distance"]))
    return Duplicates(links[order], is_bounded)
