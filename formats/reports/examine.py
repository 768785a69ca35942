"""The examination of a dataset: its content and oddities, also compared with another dataset's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.decode import encode_png
from shardprep.formats.reports.duplicates import DISTANCE, EQUAL_BYTES, Duplicates, Links
from shardprep.formats.reports.pixels import EXTREMES, ImageReading, Numbers, PixelStatistics, thumbnail
from shardprep.formats.runtime.files import save_bytes
from shardprep.formats.runtime.progress import Progress, check_seed, count_of, round_step
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.manifest import QUARANTINE_NAME
from shardprep.formats.shards.read import Rows
from shardprep.formats.shards.summary import class_counts, inspect, oddities
from shardprep.formats.verification.checks import read_quarantine

MAX_SHOWN = 24  # examples per kind

THIS, OTHER = "this", "other"

Json = dict[str, Any]


class Kind(NamedTuple):
    """A kind of observation: its title, advice, the noun of what is counted, and whether it needs fixing."""

    title: str
    advice: str
    what: str = "image"
    is_bad: bool = False


OF_PIXELS = {  # found only in images that are read
    "damaged": Kind(
        "Images that cannot be read or decoded",
        "prep verify --level decode lists all of them; prep repair rebuilds damaged shards.",
        is_bad=True,
    ),
    "leaks": Kind(
        "Images equal or similar to one in the other dataset",
        "Scores on the second dataset will be inflated by images that both have; leave each out of one of "
        "them.",
        "pair",
        is_bad=True,
    ),
    "suspects": Kind(
        "Equal or similar images with different labels",
        "Where two images have equal bytes, one of the labels is wrong. Similar images may belong to two "
        "classes: look at them.",
        "pair",
        is_bad=True,
    ),
    "equal bytes": Kind("Images with equal bytes", "They count twice in training and in accuracy.", "pair"),
    "look alike": Kind(
        "Images that look alike", "They may be scaled or compressed again, or frames of one scene.", "pair"
    ),
}
WITHOUT_RECORDS = {  # of which the dataset has no record
    "empty classes": Kind(
        "Classes without images",
        "A model cannot learn these classes from this split; check whether a folder is missing in the "
        "source.",
        "class",
        is_bad=True,
    ),
    "quarantined": Kind(
        "Images that the conversion left out",
        "They are in the source but not in the dataset; quarantine.json lists all of them.",
    ),
}
OF_INDEX = {  # among the oddities of its rows
    "EXIF orientation": Kind(
        "Images rotated by EXIF",
        'Their pixels are stored rotated; a transform with orientation="apply" rotates them back.',
    ),
    "CMYK": Kind("CMYK images", "Their colours depend on the decoder; convert them to RGB."),
    "tiny": Kind(
        "Images under 32 pixels", "Crops of them are mostly enlarged; check whether they belong here."
    ),
    "extreme aspect": Kind("Images over 16:1", "A random crop shows only a stripe of them."),
    "corrupt EXIF": Kind("Corrupt EXIF", "Their orientation is unknown."),
    "several frames": Kind("Several pages or frames", "The first is decoded."),
    "trailing bytes": Kind("Bytes after the end of the image", "Decoders ignore them."),
}
KINDS = OF_PIXELS | WITHOUT_RECORDS | OF_INDEX
"""The kinds of observations by their JSON names."""


def observation(kind: str, count: int, *, measured: str = "", **more: Any) -> Json:
    """Return an observation of one of KINDS as a JSON object; ``measured`` is a sentence before the advice.

    ``more`` may have ``is_partial``, if only some images were examined; the first ``records``, ``pairs`` or
    ``names``; ``all_pairs``; and the records to ``leave_out``, without which nothing would be found.
    """
    own = KINDS[kind]
    lists = dict.fromkeys(("records", "pairs", "names", "all_pairs", "leave_out"), ())
    described = own._asdict() | {"advice": f"{measured} {own.advice}".lstrip()}
    return {"kind": kind, "count": count, "is_partial": False} | described | lists | more


@dataclass(frozen=True)
class RecordNames:
    """The records of one or two datasets, numbered consecutively, in the form that a page shows.

    ``named`` are the datasets ("this" or "other") and numbers of the records that :meth:`describe` returned.
    """

    datasets: Sequence[Dataset]
    named: set[tuple[str, int]] = field(default_factory=set)

    def place(self, number: int) -> tuple[str, int]:
        """Return a record's dataset, "this" or "other", and its number there."""
        first = len(self.datasets[0])
        return (THIS, number) if number < first else (OTHER, number - first)

    def describe(self, number: int, note: str = "") -> Json:
        """Return a record as a JSON object; ``note`` adds a remark, such as why it is damaged.

        The class is None without a label; ``width`` and ``height`` are pixels, ``bytes`` is the image's size.
        """
        which, record = self.place(number)
        self.named.add((which, record))
        dataset = self.datasets[0 if which == THIS else 1]
        row = dataset.index[record]
        label = int(row["label"])
        its_class = dataset.manifest.labels.classes[label] if label >= 0 else None
        return {
            "dataset": which,
            "record": record,
            "key": row["key"].decode("utf-8", "replace"),
            "label": label,
            "class_name": its_class.name if its_class else None,
            "class_words": its_class.words if its_class else None,
            "width": int(row["width"]),
            "height": int(row["height"]),
            "bytes": int(row["length"]),
            "note": note,
        }

    def pairs(self, links: Links) -> list[Json]:
        """Return the first of these links; the distance is None if the bytes are equal."""
        return [
            {"distance": _distance(distance), "records": [self.describe(first), self.describe(second)]}
            for first, second, distance in links[:MAX_SHOWN].tolist()
        ]

    def all_pairs(self, links: Links) -> list[tuple[int, str, int, int | None]]:
        """Return (first record, dataset of the second, second record, distance) of all these links."""
        return [
            (first, *self.place(second), _distance(distance)) for first, second, distance in links.tolist()
        ]


def _distance(bits: int) -> int | None:
    return None if bits == EQUAL_BYTES else bits


MAX_POINTS = 1000  # in a scatter plot
BINS = 32
OUTLIERS = 0.5  # percent of the values at each end
RENARD = (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)  # ISO 3: round numbers in equal ratios


def histogram(values: npt.NDArray[Any], *, is_logarithmic: bool = False) -> dict[str, list[Any]]:
    """Return round ``edges`` [n + 1] and ``counts`` [n] of positive numbers.

    A logarithmic histogram of widely spread values has edges in equal ratios. The first and last bars hold
    any outliers. Equal values are one bar.
    """
    if not len(values):
        return {"edges": [0.0, 1.0], "counts": [0]}
    low, high = float(values.min()), float(values.max())
    if low == high:
        return {"edges": [_round_edge(low)] * 2, "counts": [len(values)]}
    first, last = (float(part) for part in np.percentile(values, (OUTLIERS, 100 - OUTLIERS)))
    if first == last:
        first, last = low, high
    if is_logarithmic and 0 < first * 10 < last:
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)))
        inner = np.array([digit * 10.0**decade for decade in decades for digit in RENARD])
    else:
        step = round_step(max((last - first) / BINS, 0 if values.dtype.kind == "f" else 1))
        inner = np.arange(math.ceil(first / step), math.floor(last / step) + 1) * step
    inner = inner[(inner > first) & (inner < last)]
    edges = np.array([low, *inner, high])
    counts = np.histogram(values, edges)[0].tolist()
    return {"edges": list(map(_round_edge, edges.tolist())), "counts": counts}


def _round_edge(edge: float) -> float:
    return edge if edge.is_integer() else float(f"{edge:.6g}")


def index_statistics(index: Rows, classes: int, seed: int) -> Json:
    """Return statistics of an index of images in this number of classes, as a JSON object.

    All are histograms, except ``sides`` (width, height) and ``weights`` (pixels, bytes) of a seeded sample.
    """
    sizes = np.bincount(index["label"][index["label"] >= 0], minlength=classes)
    chosen = np.sort(_choose_numbers(len(index), MAX_POINTS, seed))
    width, height, length = (index[name][chosen].astype(np.int64) for name in ("width", "height", "length"))
    return {
        "class_sizes": histogram(sizes),
        "width": histogram(index["width"]),
        "height": histogram(index["height"]),
        "bytes": histogram(index["length"], is_logarithmic=True),
        "aspect": histogram(index["width"] / np.maximum(index["height"], 1), is_logarithmic=True),
        "sides": np.stack([width, height], axis=1).tolist(),
        "weights": np.stack([width * height, length], axis=1).tolist(),
    }


def same_size(indexes: list[Rows]) -> Numbers:
    """Return the numbers, over all indexes, of images that share length, width and height with another one.

    Only these can have equal bytes. Small groups come first: pairs, then groups of three, and so on.
    """
    columns = [np.concatenate([index[name] for index in indexes]) for name in ("height", "width", "length")]
    order = np.lexsort(columns)
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    sizes = np.diff(np.append(np.flatnonzero(is_new), len(order)))
    per_record = np.repeat(sizes, sizes)
    shared = per_record > 1
    return order[shared][np.argsort(per_record[shared], kind="stable")]


def _choose_numbers(count: int, most: int, seed: int) -> Numbers:
    """Choose at most ``most`` different numbers below ``count``."""
    return np.random.default_rng(seed).choice(count, min(count, most), replace=False)


PIXELS = ("none", "sample", "all")
MAX_DECODED = 4096  # images of a sample
MAX_COMPARED = 8192  # further images, read for their digests


def choose_images(indexes: list[Rows], pixels: str, seed: int) -> tuple[list[tuple[Numbers, Numbers]], Json]:
    """Choose the images to read from each dataset, and count them.

    For each dataset, returns the numbers of the images to decode, and of others to compare, in order. A
    sample is MAX_DECODED images of each dataset, and up to MAX_COMPARED images of the same size as another,
    whose bytes may be equal. Raises UsageError for unknown ``pixels``.
    """
    if pixels not in PIXELS:
        raise UsageError(f"unknown pixels {pixels!r}; choose from {', '.join(PIXELS)}")
    candidates = same_size(indexes) if pixels != "none" else np.empty(0, np.int64)
    compared = candidates if pixels == "all" else candidates[:MAX_COMPARED]
    choices, start = [], 0
    for index in indexes:
        mine = compared[(compared >= start) & (compared < start + len(index))] - start
        most = {"none": 0, "sample": MAX_DECODED, "all": len(index)}[pixels]
        decoded = np.sort(_choose_numbers(len(index), most, seed))
        choices.append((decoded, np.setdiff1d(mine, decoded)))
        start += len(index)
    return choices, {
        "pixels": pixels,
        "images": start,
        "seed": seed,
        "decoded": sum(len(decoded) for decoded, _ in choices),
        "compared": sum(map(len, chain.from_iterable(choices))),
        "same_size": len(candidates),
        "same_size_compared": len(compared),
    }


def observations(
    names: RecordNames,
    looked_at: Json,
    statistics: PixelStatistics,
    inside: Duplicates,
    across: Duplicates | None,
    quarantine: Sequence[Mapping[str, str]],
) -> list[Json]:
    """Return the observations with a count above zero.

    ``inside`` are the duplicates within the dataset, ``across`` those shared with the other one, numbered
    consecutively; ``quarantine`` lists the images that the conversion left out, with key and reason.
    """
    dataset, is_partial = names.datasets[0], looked_at["decoded"] < looked_at["images"]
    counts, damaged = class_counts(dataset), [record for record, _ in statistics.damaged]
    empty = [each.name for each in counts if not each.images] if any(each.images for each in counts) else []
    shown = [names.describe(record, reason) for record, reason in statistics.damaged[:MAX_SHOWN]]
    reasons = [f"{image['key']}: {image['reason']}" for image in quarantine[:MAX_SHOWN]]
    index = dataset.index if dataset.manifest.has_images else dataset.index[:0]
    odd = {kind: np.flatnonzero(mask).tolist() for kind, mask in oddities(index).items() if kind in OF_INDEX}
    every = [
        observation("empty classes", len(empty), names=empty[: 4 * MAX_SHOWN]),
        observation("damaged", len(damaged), is_partial=is_partial, records=shown, leave_out=damaged),
        *_pair_observations(names, inside, across, is_partial=is_partial),
        observation("quarantined", len(quarantine), names=reasons),
        *(
            observation(kind, len(rows), records=[*map(names.describe, rows[:MAX_SHOWN])], leave_out=rows)
            for kind, rows in odd.items()
        ),
    ]
    return [each for each in every if each["count"]]


def _pair_observations(
    names: RecordNames, inside: Duplicates, across: Duplicates | None, *, is_partial: bool
) -> list[Json]:
    """Return the observations of pairs: suspects, leaks, equal bytes, and images that look alike."""
    dataset = names.datasets[0]
    # the other dataset's labels are translated by class name; -2 is a class that only it has, -1 no label
    parts = [dataset.index["label"].astype(np.int64)]
    for other in names.datasets[1:]:
        own_labels = [
            dataset.manifest.labels.label_of.get(each.name, -2) for each in other.manifest.labels.classes
        ]
        parts.append(np.array([*own_labels, -1])[other.index["label"]])
    labels = np.concatenate(parts)

    def differ(links: Links) -> npt.NDArray[np.bool_]:
        """Return a mask of the links between different labels, ignoring images without a label."""
        first, second = labels[links["first"]], labels[links["second"]]
        mask: npt.NDArray[np.bool_] = (first != second) & (first != -1) & (second != -1)
        return mask

    both = [inside] if across is None else [inside, across]
    every = np.concatenate([each.links for each in both])
    is_bounded = any(each.is_bounded for each in both)

    def pair_observation(kind: str, links: Links, leave_out: Numbers) -> Json:
        exact = int(np.count_nonzero(links["distance"] == EQUAL_BYTES))
        measured = [f"{count_of(exact, 'pair')} with equal bytes"] if exact else []
        if near := len(links) - exact:
            alike = f"perceptual hashes that differ in at most {DISTANCE} of 64 bits"
            measured.append(f"{count_of(near, 'pair')} of {alike}")
        return observation(
            kind,
            len(links),
            is_partial=is_partial or is_bounded,
            measured=f"{', '.join(measured)}.",
            pairs=names.pairs(links),
            all_pairs=names.all_pairs(links),
            leave_out=np.unique(leave_out).tolist(),
        )

    wrong = every[differ(every)]
    ends = np.concatenate([wrong["first"], wrong["second"]])
    exact, near = (links[~differ(links)] for links in (inside.exact, inside.near))
    return [
        pair_observation("suspects", wrong, ends[ends < len(dataset)]),
        *([pair_observation("leaks", across.links, across.links["first"])] if across else []),
        pair_observation("equal bytes", exact, exact["second"]),
        pair_observation("look alike", near, near["second"]),
    ]


MAX_PICTURES = 480  # on all sheets
MAX_OF_A_NAMED_CLASS = 60
OF_ANY_CLASS = 8
MAX_CLASSES = 24  # if none is named


def contact_sheets(names: RecordNames, classes: Sequence[str], seed: int) -> list[Json]:
    """Return sheets of the named ``classes``, or small sheets of random ones if none is named.

    Each has some ``records`` of a class, its number of ``images``, and its ``words``, None if unknown. Raises
    UsageError for an unknown class.
    """
    dataset, rng = names.datasets[0], np.random.default_rng(seed)
    labels = dataset.index["label"]
    if isinstance(classes, str):
        raise UsageError(f"classes must be a list of names, such as [{classes!r}]")
    if classes := tuple(classes):
        chosen = []
        for name in dict.fromkeys(classes):
            if name not in dataset.space.label_of:
                close = get_close_matches(name := str(name), dataset.classes, 3)
                hint = f"; close are {printable(', '.join(close))}" if close else ""
                raise UsageError(f"has no class {printable(name)!r}{hint}", path=dataset.path)
            chosen.append(dataset.space.label_of[name])
        most = min(MAX_OF_A_NAMED_CLASS, max(1, MAX_PICTURES // len(chosen)))
    else:
        present = np.unique(labels[labels >= 0])
        chosen = np.sort(rng.choice(present, min(len(present), MAX_CLASSES), replace=False)).tolist()
        most = OF_ANY_CLASS
    sheets = []
    for label in chosen:
        records = np.flatnonzero(labels == label)
        some = np.sort(rng.choice(records, min(len(records), most), replace=False)).tolist()
        each = dataset.manifest.labels.classes[label]
        sheet = {"name": each.name, "words": each.words, "images": len(records)}
        sheets.append(sheet | {"records": [names.describe(number) for number in some]})
    return sheets


@dataclass(frozen=True)
class Examination:
    """The findings of a dataset's examination.

    ``found`` is a JSON object of everything on the page except the pictures of single images, which it names
    by record number. ``pictures`` has these as small JPEG files, by ("this" or "other", record number).
    """

    found: dict[str, Any]
    pictures: Mapping[tuple[str, int], bytes]

    def __repr__(self) -> str:
        about, count = self.found["dataset"], len(self.found["observations"])
        return f"<Examination of {about['path']!r}: {count_of(about['records'], 'record')}, {count_of(count, 'observation')}>"

    def to_json(self) -> dict[str, Any]:
        """Return the object ``found``."""
        return self.found

    def to_html(self) -> str:
        """Return the page: one self-contained file that makes no request and runs no script."""
        from shardprep.formats.reports.pages import page  # start-up time: Jinja

        about = self.found["dataset"]
        pictures = {f"{which}:{record}": data for (which, record), data in self.pictures.items()}
        title = f"{about['path']}: {about['split']}, {count_of(about['records'], 'record')}"
        mean = self.found["pixels"]["mean_image"]
        png = None if mean is None else encode_png(np.array(mean, np.uint8))
        return page("dataset", title=title, found=self.found, pictures=pictures, mean=png)

    def findings(self) -> dict[str, Any]:
        """Return the records to leave out of ``Loader(records=…)``, as a JSON object.

        ``leave_out`` has record numbers by kind of finding: all ``damaged``, ``leaks`` and ``suspects``; of
        ``equal bytes`` and ``look alike`` all but the first; and those of each oddity. ``partial`` lists the
        kinds for which only some images were examined.
        """
        about, against = self.found["dataset"], self.found["against"]
        observed = {each["kind"]: each for each in self.found["observations"]}
        kinds = OF_PIXELS | OF_INDEX
        return {
            "dataset": about["path"],
            "root": about["root"],
            "records": about["records"],
            "against": None if against is None else {"dataset": against["path"], "root": against["root"]},
            "looked_at": self.found["looked_at"],
            "partial": [kind for kind in kinds if observed.get(kind, {}).get("is_partial")],
            "leave_out": {kind: list(observed.get(kind, {}).get("leave_out", ())) for kind in kinds},
        }

    def save_findings(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`findings` to a JSON file, as :meth:`save` writes the page."""
        save_bytes(user_path(path), json.dumps(self.findings()).encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, replaced atomically.

        Raises OperationError if ``path`` is a folder or a device, OSError.
        """
        save_bytes(user_path(path), self.to_html().encode())


MAX_LISTED = 50  # archives, and shards; all are counted
MAX_CLASSES_LISTED = 20


def custody(dataset: Dataset, key: str | None = None) -> dict[str, Any]:
    """Return the chain from the source to the root, as a JSON object, with one record as an example.

    This is the record with the ``key``, or the first one. Raises UsageError for an unknown key.
    """
    manifest, shards = dataset.manifest, dataset.manifest.shards
    archives, checked = manifest.source_objects("archives"), manifest.archive_md5
    number, example = 0, None
    if not isinstance(key, str | None):
        raise UsageError(f"a record is named by its key, which is text, not {key!r}")
    if key is not None:
        matches = np.flatnonzero(dataset.index["key"] == key.encode("utf-8", "surrogatepass"))
        if not len(matches):
            raise UsageError(f"has no record with the key {printable(key, 200)!r}", path=dataset.path)
        number = int(matches[0])
    if len(dataset):
        row = dataset.index[number]
        shard = shards[int(row["shard"])]
        example = {
            "record": number,
            "key": row["key"].decode("utf-8", "replace"),
            "shard": shard.name,
            "sha256": shard.sha256,
            "ordinal": int(row["ordinal"]),
            "crc32c": f"{int(row['crc32c']):08x}",
        }
    return {
        "layout": manifest.source["layout"],
        "archives": len(archives),
        "first_archives": [
            {
                "name": str(archive.get("name")),
                "size": size if isinstance(size := archive.get("size"), int) else None,
                "md5": checked.get(str(archive.get("name"))),
            }
            for archive in archives[:MAX_LISTED]
        ],
        "in_place": manifest.archive.name if manifest.archive else None,
        "example": example,
        "content_root": manifest.content_root,
        "shards": len(shards),
        "first_shards": [shard.to_json() for shard in shards[:MAX_LISTED]],
        "writer": {str(name): str(value) for name, value in manifest.writer.items()},
        "plan": str(manifest.plan.get("sha256")),
        "root": manifest.root,
    }


def comparison(dataset: Dataset, other: Dataset, across: Duplicates) -> dict[str, Any]:
    """Compare two datasets with the shared images ``across``; return a JSON object.

    ``unbalanced`` lists the common classes whose shares differ by the largest ratios.
    """
    mine, theirs = _shares(dataset), _shares(other)
    common = sorted(mine.keys() & theirs.keys())
    shares = {name: (mine[name][1], theirs[name][1]) for name in common}
    ratios = {name: max(both) / min(both) for name, both in shares.items()}
    unbalanced = sorted((name for name in common if ratios[name] > 1), key=lambda name: -ratios[name])
    return {
        "path": os.fspath(other.path),
        "split": other.manifest.split,
        "records": len(other),
        "root": other.manifest.root,
        "common_classes": len(common),
        "missing_there": len(mine.keys() - theirs.keys()),
        "missing_here": len(theirs.keys() - mine.keys()),
        "unbalanced": [
            {
                "name": name,
                "images": mine[name][0],
                "other_images": theirs[name][0],
                "share": shares[name][0],
                "other_share": shares[name][1],
            }
            for name in unbalanced[:MAX_CLASSES_LISTED]
        ],
        "equal_images": len(np.unique(across.exact["first"])),
        "similar_images": len(np.unique(across.near["first"])),
    }


def _shares(dataset: Dataset) -> dict[str, tuple[int, float]]:
    """Return each nonempty class's number of images, and their share of all."""
    counts = {each.name: each.images for each in class_counts(dataset) if each.images}
    total = sum(counts.values())
    return {name: (count, count / total) for name, count in counts.items()}


def report(
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    against: str | os.PathLike[str] | None = None,
    pixels: str = "sample",
    classes: Sequence[str] = (),
    record: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Examine a dataset, and write a page about it. The result is the same for any number of workers.

    Damaged images and shards are observations, not errors.

    Args:
        dataset: The dataset's folder.
        output: File of the page, replaced atomically. None writes no page; the result has ``save``.
        against: The folder of another dataset to compare with: shared images, and the balance of classes.
        pixels: The images to read: "none", "sample" (at most 4,096 of each dataset are decoded, and the bytes
            of at most 8,192 more compared) or "all" (0.5 to 1.5 ms of CPU and 57 bytes of memory each).
        classes: Names of classes to show many images of; empty shows a few images of up to 24 classes.
        record: Key of the record whose provenance is shown, from its checksum to the root; None is the first.
        seed: Selects the sample and the images shown.
        workers: Number of processes that decode; None is one per usable CPU, 0 decodes in one other process.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The findings.

    Raises:
        UsageError: ``dataset`` is a folder of splits, ``seed`` is negative, or ``pixels``, a class or the key
            is unknown.
        ManifestDamaged, UnknownVersion: A manifest cannot be read.
        OperationError: A process fails, or ``output`` is a folder or a device.
        OSError: A file cannot be read or written.
    """
    with ExitStack() as stack:
        paths = [dataset] if against is None else [dataset, against]
        opened = [stack.enter_context(Dataset(path)) for path in paths]
        this, names = opened[0], RecordNames(opened)
        indexes = [each.index if each.manifest.has_images else each.index[:0] for each in opened]
        # raises UsageError before anything is read
        proof = custody(this, record)
        choices, looked_at = choose_images(indexes, pixels, check_seed(seed))
        sheets = contact_sheets(names, classes, seed) if len(indexes[0]) else []
        reading = stack.enter_context(ImageReading.start(workers, progress))
        statistics, *their = (
            reading.statistics(each, *choice) for each, choice in zip(opened, choices, strict=True)
        )
        codes, across = statistics.codes, None
        with reading.progress.task(f"find duplicates in {this.manifest.split}", records=len(codes), size=0):
            inside = Duplicates.within(codes, this.index["label"])
            for other in their:
                other.codes["record"] += len(this)
                across = Duplicates.across(codes, other.codes)
        skipped = read_quarantine(this.path) if this.manifest.table(QUARANTINE_NAME) else []
        found = {
            "dataset": inspect(this).to_json(),
            "looked_at": looked_at,
            "classes": [asdict(each) for each in class_counts(this)],
            "index": index_statistics(indexes[0], len(this.classes), seed),
            "sheets": sheets,
            "custody": proof,
            "pixels": statistics.to_json(),
            "extremes": {
                name: [names.describe(n) | {"value": value} for value, n in statistics.extremes(name)]
                for name in EXTREMES
            },
            "observations": observations(names, looked_at, statistics, inside, across, skipped),
            "against": comparison(this, opened[1], across) if across else None,
        }
        pictures: dict[tuple[str, int], bytes] = {}
        if looked_at["decoded"]:
            for which, each in zip((THIS, OTHER), opened, strict=False):
                numbers = sorted(number for where, number in names.named if where == which)
                thumbnails = reading.map("pictures of", thumbnail, each, np.array(numbers, np.int64))
                pictures |= {(which, number): picture for number, picture in thumbnails.items()}
    examined = Examination(found, pictures)
    if output is not None:
        examined.save(output)
    return examined
