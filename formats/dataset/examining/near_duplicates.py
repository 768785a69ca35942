"""Pairs of perceptual hashes that differ in few bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

BITS = 64
Hashes = npt.NDArray[np.uint64]
Pairs = npt.NDArray[np.int64]


def near_pairs(hashes: Hashes, distance: int) -> Iterator[Pairs]:
    """Yield all pairs of ``hashes`` that differ in at most ``distance`` bits, each pair once.

    A pair is (i, j) with i < j; each array yielded is int64 [n, 2]. The 64 bits are dealt to ``distance`` + 1
    bands: two hashes that differ in so few bits are equal in one of the bands at least, and only those are
    compared. A pair is yielded for the first band in which it is equal. Memory is a few times that of
    ``hashes``, unless very many are equal in a band."""
    masks = band_masks(distance + 1)
    for number, mask in enumerate(masks):
        for first, second in _near_in_band(hashes, mask, distance):
            differing = hashes[first] ^ hashes[second]
            is_new = np.ones(len(differing), bool)
            for earlier in masks[:number]:
                is_new &= (differing & earlier) != 0
            if is_new.any():
                yield np.sort(np.stack([first[is_new], second[is_new]], axis=1), axis=1)


def band_masks(bands: int) -> list[np.uint64]:
    """Return the bits of each band: every n-th bit, so that coarse and fine structure is in each."""
    return [np.uint64(sum(1 << bit for bit in range(band, BITS, bands))) for band in range(bands)]


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
