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
        for first, second in _equal_in(hashes, mask):
            differing = hashes[first] ^ hashes[second]
            is_new = np.bitwise_count(differing) <= distance
            for earlier in masks[:number]:
                is_new &= (differing & earlier) != 0
            if is_new.any():
                found = np.stack([first[is_new], second[is_new]], axis=1)
                yield np.sort(found, axis=1)


def band_masks(bands: int) -> list[np.uint64]:
    """Return the bits of each band: every n-th bit, so that coarse and fine structure is in each."""
    return [np.uint64(sum(1 << bit for bit in range(band, BITS, bands))) for band in range(bands)]


def _equal_in(
    hashes: Hashes, mask: np.uint64
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the places of hashes that are equal under a mask: neighbours in sorted order, then the next."""
    masked = hashes & mask
    order = np.argsort(masked, kind="stable")
    masked = masked[order]
    at = np.arange(len(order) - 1)
    apart = 1
    while len(at := at[at + apart < len(order)]):
        at = at[masked[at] == masked[at + apart]]
        if len(at):
            yield order[at], order[at + apart]
        apart += 1
