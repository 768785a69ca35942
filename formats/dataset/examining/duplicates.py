"""Images with equal bytes, and images that look alike: within a dataset, and across two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.table import Rows

from .near_duplicates import near_pairs

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

    Each image of ``codes`` that has an equal one, and each hash of it that ``others`` has, gives one link.
    """
    exact = _equal(codes, others, "digest", EQUAL_BYTES)
    mine, theirs = _by_hash(codes), _by_hash(others)
    same = _equal(mine, _first_of_each(theirs), "hash", 0)
    same = same[~np.isin(same["first"], exact["first"])]
    both = np.concatenate([_first_of_each(mine), _first_of_each(theirs)])
    near, is_bounded = _near(both, len(_first_of_each(mine)))
    return _sorted([exact, same, near], is_bounded)


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
