"""Observations of a report: statistics of the index, oddities, and images of each class to look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.info import EXTREME_ASPECT, KINDS, ImageFlag
from shardprep.formats.reports.duplicates import DISTANCE, EQUAL_BYTES, Duplicates, Links
from shardprep.formats.reports.pixels import PixelStatistics
from shardprep.formats.runtime.sizes import count_of, round_step
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.files import Rows

MOST_SHOWN = 24  # examples of one kind

THIS, OTHER = "this", "other"


@dataclass(frozen=True)
class ShownRecord:
    """A record as a page names it.

    ``dataset`` is "this", or "other" of a comparison; ``record`` its number, ``key`` and ``label`` its own.
    ``class_name`` and ``class_words`` are those of the label, None without. ``width``, ``height`` (pixels)
    and ``bytes`` are the image's. ``note`` says more, such as why it is damaged."""

    dataset: str
    record: int
    key: str
    label: int
    class_name: str | None
    class_words: str | None
    width: int
    height: int
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class ShownPair:
    """Two records, and the bits in which their hashes differ: None where their bytes are equal."""

    distance: int | None
    records: tuple[ShownRecord, ShownRecord]


@dataclass(frozen=True)
class Observation:
    """One kind of oddity.

    ``kind`` names it for programs, ``title`` for people; ``is_bad`` is whether it probably has to be mended,
    and ``advice`` what to do. ``count`` is how many of ``what`` (a noun) there are; with ``is_partial`` only
    a part of the images was looked at, so that there may be more. ``records``, ``pairs`` or ``names`` are the
    first of them.

    ``all_pairs`` has each pair: the number of a record, "this" or "other" for the dataset of the second
    record, its number, and the bits in which their hashes differ, None where their bytes are equal.
    ``leave_out`` are the numbers of the dataset's records without which there would be no such finding."""

    kind: str
    title: str
    is_bad: bool
    count: int
    what: str
    advice: str
    is_partial: bool = False
    records: Sequence[ShownRecord] = ()
    pairs: Sequence[ShownPair] = ()
    names: Sequence[str] = ()
    all_pairs: Sequence[tuple[int, str, int, int | None]] = ()
    leave_out: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the observation as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class RecordNames:
    """The records of one or two datasets, numbered one after the other, as a page names them."""

    datasets: Sequence[Dataset]

    def shown(self, number: int, note: str = "") -> ShownRecord:
        """Return the record of a number; those of the second dataset begin after the first."""
        first = len(self.datasets[0])
        which, record = (THIS, number) if number < first else (OTHER, number - first)
        dataset = self.datasets[0 if which == THIS else 1]
        row = dataset.index[record]
        label = int(row["label"])
        its_class = dataset.manifest.labels.classes[label] if label >= 0 else None
        return ShownRecord(
            dataset=which,
            record=record,
            key=row["key"].decode("utf-8", "replace"),
            label=label,
            class_name=its_class.name if its_class else None,
            class_words=its_class.words if its_class else None,
            width=int(row["width"]),
            height=int(row["height"]),
            bytes=int(row["length"]),
            note=note,
        )

    def some(self, numbers: Iterable[int]) -> list[ShownRecord]:
        """Return the records of the first of these numbers."""
        return [self.shown(int(number)) for number in islice(numbers, MOST_SHOWN)]

    def pairs(self, links: Links) -> list[ShownPair]:
        """Return the first of these links."""
        return [
            ShownPair(None if distance == EQUAL_BYTES else distance, (self.shown(first), self.shown(second)))
            for first, second, distance in links[:MOST_SHOWN].tolist()
        ]

    def all_pairs(self, links: Links) -> list[tuple[int, str, int, int | None]]:
        """Return the numbers of all these links, as an observation has them."""
        size = len(self.datasets[0])
        return [
            (
                first,
                THIS if second < size else OTHER,
                second if second < size else second - size,
                None if distance == EQUAL_BYTES else distance,
            )
            for first, second, distance in links.tolist()
        ]


MOST_POINTS = 1000  # of a scatter plot
BINS = 32
OUTLIERS = 0.5  # percent of the values at either end
RENARD = (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)  # ISO 3: round numbers in equal ratios
TINY = 32  # pixels of the shorter side


@dataclass(frozen=True)
class Histogram:
    """The number of values between each two ``edges``: ``counts`` [n] for ``edges`` [n + 1]."""

    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, values: npt.NDArray[Any], *, is_logarithmic: bool = False) -> Histogram:
        """Return the histogram of positive numbers with round edges, in equal ratios if it is logarithmic.

        The first and the last bar hold the outliers, if there are some. Equal values are one bar.
        """
        if not len(values):
            return cls([0.0, 1.0], [0])
        low, high = float(values.min()), float(values.max())
        if low == high:
            return cls([round(low, 3)] * 2, [len(values)])
        first, last = (float(part) for part in np.percentile(values, (OUTLIERS, 100 - OUTLIERS)))
        if first == last:
            first, last = low, high
        if is_logarithmic and first * 10 < last:
            decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)))
            inner = np.array([digit * 10.0**decade for decade in decades for digit in RENARD])
        else:
            step = round_step(max((last - first) / BINS, 0 if values.dtype.kind == "f" else 1))
            inner = np.arange(math.ceil(first / step), math.floor(last / step) + 1) * step
        inner = inner[(inner > first) & (inner < last)]
        edges = np.array([low, *inner, high])
        return cls([round(edge, 3) for edge in edges.tolist()], np.histogram(values, edges)[0].tolist())


@dataclass(frozen=True)
class IndexStatistics:
    """Statistics of the index of images.

    ``class_sizes``, ``width``, ``height`` (pixels), ``bytes`` and ``aspect`` (width / height) are histograms.
    ``sides`` are (width, height) and ``weights`` (pixels, bytes) of a seeded sample of at most MOST_POINTS
    images."""

    class_sizes: Histogram
    width: Histogram
    height: Histogram
    bytes: Histogram
    aspect: Histogram
    sides: list[tuple[int, int]]
    weights: list[tuple[int, int]]


def index_statistics(index: Rows, classes: int, seed: int) -> IndexStatistics:
    """Return the statistics of an index of images with labels of so many classes.

    Beside the index this takes a few columns of memory, 8 bytes a record each.
    """
    sizes = np.bincount(index["label"][index["label"] >= 0], minlength=classes)
    chosen = np.sort(_sample(len(index), MOST_POINTS, seed))
    width, height, length = (index[name][chosen].astype(np.int64) for name in ("width", "height", "length"))
    return IndexStatistics(
        class_sizes=Histogram.of(sizes),
        width=Histogram.of(index["width"]),
        height=Histogram.of(index["height"]),
        bytes=Histogram.of(index["length"], is_logarithmic=True),
        aspect=Histogram.of(index["width"] / np.maximum(index["height"], 1), is_logarithmic=True),
        sides=list(zip(width.tolist(), height.tolist(), strict=True)),
        weights=list(zip((width * height).tolist(), length.tolist(), strict=True)),
    )


def odd_records(index: Rows) -> dict[str, npt.NDArray[np.int64]]:
    """Return the record numbers of unusual images by property; an image may have several."""
    flags, width, height = index["flags"], index["width"].astype(np.int64), index["height"].astype(np.int64)
    is_jpeg = flags & sum(KINDS.values()) == 0
    found = {
        "CMYK": (index["components"] == 4) & is_jpeg,
        "EXIF orientation": index["orientation"] != 1,
        "corrupt EXIF": (flags & ImageFlag.CORRUPT_EXIF) != 0,
        "tiny": np.minimum(width, height) < TINY,
        "extreme aspect": np.maximum(width, height) > EXTREME_ASPECT * np.minimum(width, height),
        "several frames": (flags & ImageFlag.SEVERAL) != 0,
        "trailing bytes": (flags & ImageFlag.TRAILING_BYTES) != 0,
    }
    return {name: np.flatnonzero(mask) for name, mask in found.items()}


def same_size(indexes: list[Rows]) -> npt.NDArray[np.int64]:
    """Return the numbers, over all indexes, of images with the length, width and height of another one.

    Only these can have equal bytes. Those of small groups come first: of pairs, then of three, and so on.
    """
    columns = [np.concatenate([index[name] for index in indexes]) for name in ("height", "width", "length")]
    order = np.lexsort(columns)
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    sizes = np.diff(np.append(np.flatnonzero(is_new), len(order)))
    per_record = np.repeat(sizes, sizes)
    shared = per_record > 1
    return order[shared][np.argsort(per_record[shared], kind="stable")]


def _sample(count: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Return at most so many numbers below ``count``, none twice; all of them if they are not more."""
    return np.random.default_rng(seed).choice(count, min(count, most), replace=False)


PIXELS = ("none", "sample", "all")
MOST_DECODED = 4096  # images of a sample
MOST_COMPARED = 8192  # further images, read for their digest


@dataclass(frozen=True)
class Choice:
    """The images of one dataset that are read: ``records`` in order, and whether each is decoded."""

    records: npt.NDArray[np.int64]
    is_decoded: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LookedAt:
    """How much of the datasets was examined.

    ``pixels`` is "none", "sample" or "all", ``images`` the number of images of all datasets, ``seed`` that of
    the sample, ``decoded`` the number of images that were decoded, ``compared`` the number whose bytes were
    compared, ``same_size`` the number that share their length, width and height with another, so that their
    bytes can be equal, and ``same_size_compared`` how many of these were read."""

    pixels: str
    images: int
    seed: int
    decoded: int
    compared: int
    same_size: int
    same_size_compared: int


def chosen(indexes: list[Rows], pixels: str, seed: int) -> tuple[list[Choice], LookedAt]:
    """Return which images of each dataset are read, and how much that is of all together.

    A sample is MOST_DECODED images of each dataset, or all of a smaller one, and those that may have equal
    bytes, up to MOST_COMPARED. Raises UsageError for unknown ``pixels``."""
    if pixels not in PIXELS:
        raise UsageError(f"unknown pixels {pixels!r}; known are {', '.join(PIXELS)}")
    candidates = same_size(indexes) if pixels != "none" else np.empty(0, np.int64)
    compared = candidates if pixels == "all" else candidates[:MOST_COMPARED]
    choices, start = [], 0
    for index in indexes:
        mine = compared[(compared >= start) & (compared < start + len(index))] - start
        decoded = _sample(len(index), {"none": 0, "sample": MOST_DECODED, "all": len(index)}[pixels], seed)
        records = np.union1d(decoded, mine)
        choices.append(Choice(records, np.isin(records, decoded)))
        start += len(index)
    return choices, LookedAt(
        pixels=pixels,
        images=start,
        seed=seed,
        decoded=sum(int(choice.is_decoded.sum()) for choice in choices),
        compared=sum(len(choice.records) for choice in choices),
        same_size=len(candidates),
        same_size_compared=len(compared),
    )


ODDITIES = {
    "EXIF orientation": (
        "Images rotated by EXIF",
        'Their pixels are stored rotated; a transform with orientation="apply" rotates them back.',
    ),
    "CMYK": ("CMYK images", "Their colours depend on the decoder; convert them to RGB."),
    "tiny": ("Images under 32 pixels", "Crops of them are mostly enlarged; check whether they belong here."),
    "extreme aspect": ("Images over 16:1", "A random crop shows only a stripe of them."),
    "corrupt EXIF": ("Corrupt EXIF", "Their orientation is unknown."),
    "several frames": ("Several pages or frames", "The first is decoded."),
    "trailing bytes": ("Bytes after the end of the image", "Decoders ignore them."),
}


@dataclass(frozen=True)
class Findings:
    """Findings of one dataset, and of the one it is compared with, numbered one after the other.

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
        """Whether there are images whose pixels were not examined."""
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
    index = found.dataset.index if found.dataset.manifest.has_images else found.dataset.index[:0]
    odd = [
        Observation(
            kind=kind,
            title=ODDITIES[kind][0],
            is_bad=False,
            count=len(records),
            what="image",
            advice=ODDITIES[kind][1],
            records=found.names.some(records),
            leave_out=records.tolist(),
        )
        for kind, records in odd_records(index).items()
    ]
    first = [_empty_classes(found.dataset), _damaged(found), *_of_duplicates(found), _quarantined(found)]
    return [one for one in (*first, *odd) if one.count]


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
        advice=(
            "A model cannot learn these classes from this split; check whether a folder is missing in the "
            "source."
        ),
        names=names[: 4 * MOST_SHOWN],
    )


def _damaged(found: Findings) -> Observation:
    damaged = found.statistics.damaged[:MOST_SHOWN]
    return Observation(
        kind="damaged",
        title="Images that cannot be read or decoded",
        is_bad=True,
        count=len(found.statistics.damaged_records),
        what="image",
        advice="prep verify --level decode lists all of them; prep repair rebuilds damaged shards.",
        is_partial=found.is_partial,
        records=[found.names.shown(record, reason) for record, reason in damaged],
        leave_out=found.statistics.damaged_records,
    )


def _of_duplicates(found: Findings) -> Iterator[Observation]:
    labels, inside, records = found.labels(), found.inside, len(found.dataset)
    both = inside.links if found.across is None else np.concatenate([inside.links, found.across.links])
    wrong = both[_differ(labels, both)]
    ends = np.concatenate([wrong["first"], wrong["second"]])
    yield _pairs(
        found, "suspects", "Equal or similar images with different labels", wrong, is_bad=True,
        leave_out=ends[ends < records],
        advice=(
"Where two images have equal bytes, one of the labels is wrong. Similar images may belong to two classes: "
"look at them."
),
    )  # fmt: skip
    if found.across is not None:
        leaks = found.across.links
        yield _pairs(
            found, "leaks", "Images equal or similar to one in the other dataset", leaks, is_bad=True,
            leave_out=leaks["first"],
            advice=(
"Scores on the second dataset will be inflated by images that both have; leave each out of one of them."
),
        )  # fmt: skip
    exact = inside.exact[~_differ(labels, inside.exact)]
    yield _pairs(
        found, "equal bytes", "Images with equal bytes", exact, is_bad=False, leave_out=exact["second"],
        advice="They count twice in training and in accuracy.",
    )  # fmt: skip
    near = inside.near[~_differ(labels, inside.near)]
    yield _pairs(
        found, "look alike", "Images that look alike", near, is_bad=False, leave_out=near["second"],
        advice="They may be scaled or compressed again, or frames of one scene.",
    )  # fmt: skip


def _pairs(
    found: Findings,
    kind: str,
    title: str,
    links: Links,
    *,
    is_bad: bool,
    advice: str,
    leave_out: npt.NDArray[np.int64],
) -> Observation:
    is_bounded = found.inside.is_bounded or (found.across is not None and found.across.is_bounded)
    return Observation(
        kind=kind,
        title=title,
        is_bad=is_bad,
        count=len(links),
        what="pair",
        advice=f"{_measured(links)} {advice}",
        is_partial=found.is_partial or is_bounded,
        pairs=found.names.pairs(links),
        all_pairs=found.names.all_pairs(links),
        leave_out=np.unique(leave_out).tolist(),
    )


def _measured(links: Links) -> str:
    """Say how many of the links are of equal bytes, and how much the hashes of the others differ."""
    exact = int(np.count_nonzero(links["distance"] == EQUAL_BYTES))
    parts = [f"{count_of(exact, 'pair')} with equal bytes"] if exact else []
    if near := len(links) - exact:
        parts.append(
            f"{count_of(near, 'pair')} of perceptual hashes that differ in at most {DISTANCE} of 64 bits"
        )
    return f"{', '.join(parts)}."


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
        advice="They are in the source but not in the dataset; quarantine.json lists all of them.",
        names=[f"{key}: {reason}" for key, reason in found.quarantine[:MOST_SHOWN]],
    )


MOST_PICTURES = 480  # on all sheets
MOST_OF_A_NAMED_CLASS = 60
OF_ANY_CLASS = 8
MOST_CLASSES = 24  # where none is named


@dataclass(frozen=True)
class Sheet:
    """Some ``records`` of a class that has so many ``images``, and its ``words``, None if unknown."""

    name: str
    words: str | None
    images: int
    records: list[ShownRecord]


def contact_sheets(names: RecordNames, classes: Sequence[str], seed: int) -> list[Sheet]:
    """Return the sheets of the named ``classes``; of none, small ones of some classes that the seed chooses.

    Raises UsageError for a class that the dataset does not have.
    """
    dataset, rng = names.datasets[0], np.random.default_rng(seed)
    labels = dataset.index["label"]
    if classes:
        chosen = [_label(dataset, name) for name in dict.fromkeys(classes)]
        most = min(MOST_OF_A_NAMED_CLASS, max(1, MOST_PICTURES // len(chosen)))
    else:
        present = np.unique(labels[labels >= 0])
        chosen = np.sort(rng.choice(present, min(len(present), MOST_CLASSES), replace=False)).tolist()
        most = OF_ANY_CLASS
    sheets = []
    for label in chosen:
        records = np.flatnonzero(labels == label)
        some = np.sort(rng.choice(records, min(len(records), most), replace=False)).tolist()
        each = dataset.manifest.labels.classes[label]
        sheets.append(Sheet(each.name, each.words, len(records), [names.shown(n) for n in some]))
    return sheets


def _label(dataset: Dataset, name: str) -> int:
    label = dataset.manifest.labels.label_of.get(name)
    if label is None:
        close = get_close_matches(name, dataset.classes, 3)
        hint = f"; close are {printable(', '.join(close))}" if close else ""
        raise UsageError(f"has no class {printable(name)!r}{hint}", path=dataset.path)
    return label
