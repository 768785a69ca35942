"""The observations of an examination, the gravest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.dataset.dataset import Dataset

from .choice import LookedAt
from .duplicates import Duplicates, Links
from .index_statistics import odd_records
from .observation import MOST_SHOWN, Observation, RecordNames
from .pixels.pixel_statistics import PixelStatistics

ODDITIES = {
    "EXIF orientation": (
        "Images that EXIF turns",
        'Their pixels are stored turned; orientation="apply" of a transform turns them.',
    ),
    "CMYK": ("CMYK images", "Their colours depend on the decoder; convert them to RGB."),
    "tiny": ("Images under 32 pixels", "A crop of them is mostly enlarged; see whether they belong here."),
    "extreme aspect": ("Images over 16:1", "A random crop shows a stripe of them."),
    "corrupt EXIF": ("Corrupt EXIF", "Their orientation cannot be known."),
    "several frames": ("Several pages or frames", "The first is decoded."),
    "trailing bytes": ("Bytes after the image's end", "Decoders ignore them."),
}


@dataclass(frozen=True)
class Findings:
    """What was found of one dataset, and of the one it is compared with, numbered one after the other.

    ``inside`` are the duplicates within the dataset and ``across`` those shared with the other;
    ``quarantine`` are (key, reason) of images that the conversion left out."""

    names: RecordNames
    looked_at: LookedAt
    statistics: PixelStatistics
    inside: Duplicates
    across: Duplicates | None
    quarantine: list[tuple[str, str]]

    @property
    def dataset(self) -> Dataset:
        return self.names.datasets[0]

    @property
    def is_partial(self) -> bool:
        """Whether there are images of which the pixels were not looked at."""
        return self.looked_at.decoded < self.looked_at.images

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the labels of all records, those of the other dataset by the names of this one's classes.

        A class that only the other has is -2, and no label -1.
        """
        mine = self.dataset.manifest.labels.label_of
        parts = [self.dataset.index["label"].astype(np.int64)]
        for other in self.names.datasets[1:]:
            known = [mine.get(each.name, -2) for each in other.manifest.labels.classes]
            parts.append(np.array([*known, -1])[other.index["label"]])
        return np.concatenate(parts)


def observations(found: Findings) -> list[Observation]:
    """Return what there is to point out; of nothing there is no observation."""
    return [one for one in _all(found) if one.count]


def _all(found: Findings) -> Iterator[Observation]:
    yield _empty_classes(found.dataset)
    yield _damaged(found)
    yield from _of_duplicates(found)
    yield _quarantined(found)
    index = found.dataset.index if found.dataset.manifest.has_images else found.dataset.index[:0]
    for kind, records in odd_records(index).items():
        title, advice = ODDITIES[kind]
        shown = found.names.some(records)
        yield Observation(kind, title, False, len(records), "image", advice, records=shown)


def _empty_classes(dataset: Dataset) -> Observation:
    labels, classes = dataset.index["label"], dataset.manifest.labels.classes
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    names = [classes[label].name for label in np.flatnonzero(counts == 0).tolist()] if counts.any() else []
    return Observation(
        kind="empty classes",
        title="Classes without images",
        is_bad=True,
        count=len(names),
        what="class",
        advice="A model cannot learn them from this split; see whether a folder is missing in the source.",
        names=names[: 4 * MOST_SHOWN],
    )


def _damaged(found: Findings) -> Observation:
    damaged = found.statistics.damaged[:MOST_SHOWN]
    return Observation(
        kind="damaged",
        title="Images that cannot be read or decoded",
        is_bad=True,
        count=found.statistics.damaged_images,
        what="image",
        advice="prep verify --level decode lists all of them; prep repair rebuilds damaged shards.",
        is_partial=found.is_partial,
        records=[found.names.shown(record, reason) for record, reason in damaged],
    )


def _of_duplicates(found: Findings) -> Iterator[Observation]:
    labels, inside = found.labels(), found.inside
    both = inside.links if found.across is None else np.concatenate([inside.links, found.across.links])
    differs = _differ(labels, both)
    yield _pairs(
        found, "suspects", "Equal or similar images with different labels", both[differs], is_bad=True,
        advice="One label of each pair is probably wrong.",
    )  # fmt: skip
    if found.across is not None:
        leaks = found.across.links
        yield _pairs(
            found, "leaks", "Images that the other dataset has, too", leaks, is_bad=True,
            advice="Results on one of the two are too good; leave them out of training, or out of the test.",
        )  # fmt: skip
    yield _pairs(
        found, "equal bytes", "Images with equal bytes", inside.exact[~_differ(labels, inside.exact)],
        is_bad=False, advice="They count twice in training and in accuracies.",
    )  # fmt: skip
    yield _pairs(
        found, "look alike", "Images that look alike", inside.near[~_differ(labels, inside.near)],
        is_bad=False, advice="Scaled, compressed again, or frames of one scene.",
    )  # fmt: skip


def _pairs(found: Findings, kind: str, title: str, links: Links, *, is_bad: bool, advice: str) -> Observation:
    is_bounded = found.inside.is_bounded or (found.across is not None and found.across.is_bounded)
    return Observation(
        kind=kind,
        title=title,
        is_bad=is_bad,
        count=len(links),
        what="pair",
        advice=advice,
        is_partial=found.is_partial or is_bounded,
        pairs=found.names.pairs(links),
    )


def _differ(labels: npt.NDArray[np.int64], links: Links) -> npt.NDArray[np.bool_]:
    """Return which links are between different labels; an image without a label has no other one."""
    first, second = labels[links["first"]], labels[links["second"]]
    differ: npt.NDArray[np.bool_] = (first != second) & (first != -1) & (second != -1)
    return differ


def _quarantined(found: Findings) -> Observation:
    return Observation(
        kind="quarantined",
        title="Images that the conversion left out",
        is_bad=False,
        count=len(found.quarantine),
        what="image",
        advice="They are in the source, and not in the dataset; quarantine.json lists all of them.",
        names=[f"{key}: {reason}" for key, reason in found.quarantine[:MOST_SHOWN]],
    )
