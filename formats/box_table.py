"""The table of boxes: gathered before the shards are built, placed when the index is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from .index import BOX_DTYPE, Rows
from .labels import UNLABELLED, LabelSpace
from .source import Box

BOXES_AT_ONCE = 1 << 15
SIDES = ("x_min", "y_min", "x_max", "y_max")


@dataclass(frozen=True)
class GatheredBoxes:
    """All boxes of a split with their images' keys; 45 bytes each."""

    keys: npt.NDArray[np.bytes_]
    rows: npt.NDArray[np.void]

    @property
    def digest(self) -> str:
        """SHA-256 that tells these boxes from others."""
        digest = hashlib.sha256(self.keys.tobytes())
        digest.update(self.rows.tobytes())
        return digest.hexdigest()

    def placed(self, index: Rows) -> npt.NDArray[np.void]:
        """The rows in the order of the index; a box of an image that is not in it is left out."""
        by_key = np.argsort(index["key"], kind="stable")
        sorted_keys = index["key"][by_key]
        at = np.minimum(np.searchsorted(sorted_keys, self.keys), len(sorted_keys) - 1)
        rows = self.rows.copy()
        rows["record"] = by_key[at]
        known = rows[sorted_keys[at] == self.keys]
        in_order: npt.NDArray[np.void] = known[np.argsort(known["record"], kind="stable")]
        return in_order


def gather(boxes: Iterator[Box], labels: LabelSpace) -> GatheredBoxes:
    """Read all boxes. Raises what reading them raises: before the first shard, not after the last."""
    keys, rows = [np.zeros(0, "S1")], [np.zeros(0, BOX_DTYPE)]
    while some := list(islice(boxes, BOXES_AT_ONCE)):
        keys.append(np.array([box.key.encode() for box in some]))
        rows.append(_rows(some, labels))
    return GatheredBoxes(np.concatenate(keys), np.concatenate(rows))


def _rows(boxes: list[Box], labels: LabelSpace) -> npt.NDArray[np.void]:
    rows = np.zeros(len(boxes), BOX_DTYPE)
    rows["label"] = [labels.label_of.get(box.name, UNLABELLED) for box in boxes]
    for side in SIDES:
        rows[side] = [getattr(box, side) for box in boxes]
    return rows
