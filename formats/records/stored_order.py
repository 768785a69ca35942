"""The stored order of records: by key, shuffled by a seed, or that of the items that were saved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ORDERS = ("shuffled", "key")
GIVEN = "given"  # of items that were saved: as they were given
GIVEN_SHUFFLED = "given-shuffled"  # as they were given, shuffled by the seed
ITEM_ORDERS = (GIVEN, GIVEN_SHUFFLED)
ARCHIVE_ORDER = "archive"  # of images that stay in their archive


MAX_SEED = (1 << 64) - 1


def permutation(count: int, seed: int) -> npt.NDArray[np.intp]:
    """Return a uniform permutation of ``range(count)``: the sorting order of Philox's raw 64-bit stream.

    numpy guarantees the raw stream of Philox (Salmon et al. 2011), while the algorithm of
    ``Generator.permutation`` may change.
    """
    stream = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(stream, kind="stable")


def is_class_sorted(labels: npt.NDArray[np.int32]) -> bool:
    """Whether each class is one run of records, which trains badly when read in stored order."""
    runs = 1 + int(np.count_nonzero(np.diff(labels)))
    classes = len(np.unique(labels))
    return classes > 1 and runs == classes
