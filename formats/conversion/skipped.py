"""The images that a conversion left out on request, summed up by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardprep.formats.conversion.building.build_shard import SkippedImage
from shardprep.formats.images.causes import cause_of
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.source import Entries


@dataclass(frozen=True, slots=True)
class SkippedCause:
    """A cause: ``count`` images, of which ``first`` is the first key."""

    cause: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} {self.cause} (first: {self.first})"


@dataclass(frozen=True)
class SkippedImages:
    """The images that were left out.

    ``count`` is their number, and ``causes`` has a :class:`SkippedCause` for each cause, the most frequent
    first. ``emptied`` are the names of the classes of which no image is left: they keep their labels.
    """

    count: int = 0
    causes: tuple[SkippedCause, ...] = ()
    emptied: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return "12 images: 7 not an image (first: a/b.txt), 5 truncated (first: a/c.jpg)"."""
        images = f"{self.count:,} image" + ("s" if self.count != 1 else "")
        return f"{images}: {', '.join(map(str, self.causes))}" if self.causes else images


def sum_up(skipped: Sequence[SkippedImage], entries: Entries, labels: LabelSpace) -> SkippedImages:
    """Return the summary of the images that were left out of ``entries``."""
    if not skipped:
        return SkippedImages()
    keys = defaultdict(list)
    for image in skipped:
        keys[cause_of(image.reason)].append(image.key)
    causes = [SkippedCause(cause, len(found), min(found)) for cause, found in keys.items()]
    return SkippedImages(
        count=len(skipped),
        causes=tuple(sorted(causes, key=lambda one: (-one.count, one.cause))),
        emptied=_emptied({image.key.encode() for image in skipped}, entries, labels),
    )


def _emptied(keys: set[bytes], entries: Entries, labels: LabelSpace) -> tuple[str, ...]:
    """Return the classes in the entries of which no other keys are there."""
    is_left_out = np.fromiter((key in keys for key in entries["key"].tolist()), bool, len(entries))
    before, after = entries["label"], entries["label"][~is_left_out]
    gone = np.setdiff1d(before[before >= 0], after)
    return tuple(labels.classes[label].name for label in gone.tolist())
