"""The examination of a dataset: its contents, compared with those of another one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.reports.duplicates import Duplicates, duplicates, shared
from shardprep.formats.reports.observations import (
    ODDITIES,
    OTHER,
    THIS,
    Findings,
    RecordNames,
    chosen,
    contact_sheets,
    index_statistics,
    observations,
)
from shardprep.formats.reports.pixels import ImageReading
from shardprep.formats.runtime.files import save_bytes, user_path
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.workers import WorkerPool, usable_cpus
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.manifest import QUARANTINE_NAME
from shardprep.formats.shards.summary import class_counts, inspect
from shardprep.formats.verification.checks import quarantined

Pictures = Mapping[tuple[str, int], bytes]


@dataclass(frozen=True)
class Examination:
    """Content of a dataset, examined.

    ``found`` is a JSON object with all that the page shows, but for the pictures of single images, which it
    names by record number. ``pictures`` are these as small JPEG files, by ("this" or "other", record number).
    """

    found: dict[str, Any]
    pictures: Pictures

    def __repr__(self) -> str:
        about, seen = self.found["dataset"], self.found["observations"]
        return f"<Examination of {about['path']!r}: {about['records']:,} records, {len(seen)} observations>"

    def to_json(self) -> dict[str, Any]:
        """Return the object ``found``."""
        return self.found

    def to_html(self) -> str:
        """Return the page: one file that needs nothing else, makes no request, and runs no program."""
        from shardprep.formats.images.decode import png_of  # start-up time: OpenCV
        from shardprep.formats.reports.pages import page  # start-up time: Jinja

        about = self.found["dataset"]
        pictures = {f"{which}:{record}": data for (which, record), data in self.pictures.items()}
        title = f"{about['path']}: {about['split']}, {about['records']:,} records"
        mean = self.found["pixels"]["mean_image"]
        png = None if mean is None else png_of(np.array(mean, np.uint8))
        return page("dataset", title=title, found=self.found, pictures=pictures, mean=png)

    def findings(self) -> dict[str, Any]:
        """Return which records to leave out of ``Loader(records=…)``, as a JSON object.

        ``leave_out`` has record numbers by the kind of finding: all that are ``damaged``, ``leaks`` and
        ``suspects``; of ``equal bytes`` and ``look alike`` all but the first; and those of each oddity.
        ``partial`` are the kinds for which only some of the images were examined.
        """
        about, against = self.found["dataset"], self.found["against"]
        seen = {one["kind"]: one for one in self.found["observations"]}
        kinds = ("damaged", "leaks", "suspects", "equal bytes", "look alike", *ODDITIES)
        return {
            "dataset": about["path"],
            "root": about["root"],
            "records": about["records"],
            "against": None if against is None else {"dataset": against["path"], "root": against["root"]},
            "looked_at": self.found["looked_at"],
            "partial": [kind for kind in kinds if kind in seen and seen[kind]["is_partial"]],
            "leave_out": {kind: list(seen[kind]["leave_out"]) if kind in seen else [] for kind in kinds},
        }

    def save_findings(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`findings` to a JSON file, as :meth:`save` writes the page."""
        save_bytes(user_path(path), json.dumps(self.findings()).encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file ``path``, which it replaces at once.

        Raises OperationError if a folder or a device is there, OSError.
        """
        save_bytes(user_path(path), self.to_html().encode())


def shown_in(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the records that a JSON object names, wherever in it they are."""
    if isinstance(value, dict):
        if value.keys() >= {"dataset", "record", "key"}:
            yield value["dataset"], value["record"]
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        yield from shown_in(part)


MOST_OF_A_KEY = 200  # characters in an error
MOST_LISTED = 50  # archives, and shards; all are counted


def custody(dataset: Dataset, key: str | None = None) -> dict[str, Any]:
    """Return what leads from the source to the root, as a JSON object, with one record as an example.

    It is the record with the ``key``, or the first. Raises UsageError for a key that the dataset does not
    have.
    """
    manifest, shards = dataset.manifest, dataset.manifest.shards
    archives, checked = manifest.source.get("archives"), manifest.archive_md5
    named = [one for one in archives if isinstance(one, dict)] if isinstance(archives, list) else []
    number, example = 0, None
    if key is not None:
        found = np.flatnonzero(dataset.index["key"] == key.encode("utf-8", "surrogatepass"))
        if not len(found):
            raise UsageError(
                f"has no record with the key {printable(key, MOST_OF_A_KEY)!r}", path=dataset.path
            )
        number = int(found[0])
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
        "archives": len(named),
        "first_archives": [
            {"name": str(one.get("name")), "size": _size(one), "md5": checked.get(str(one.get("name")))}
            for one in named[:MOST_LISTED]
        ],
        "in_place": manifest.archive.name if manifest.archive else None,
        "example": example,
        "content_root": manifest.content_root,
        "shards": len(shards),
        "first_shards": [shard.to_json() for shard in shards[:MOST_LISTED]],
        "writer": {str(name): str(value) for name, value in manifest.writer.items()},
        "plan": str(manifest.plan.get("sha256")),
        "root": manifest.root,
    }


def _size(archive: dict[str, Any]) -> int | None:
    size = archive.get("size")
    return size if isinstance(size, int) else None


MOST_CLASSES_LISTED = 20


@dataclass(frozen=True)
class ClassShares:
    """A class that both datasets have: its images in each, and its share of each."""

    name: str
    images: int
    other_images: int
    share: float
    other_share: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of a dataset with another one.

    ``path``, ``split``, ``records`` and ``root`` are the other's. ``common_classes`` is the number of classes
    that both have, ``missing_there`` and ``missing_here`` how many only one has, and ``unbalanced`` the
    common classes with the largest ratio of their shares. Of the examined images, ``equal_images`` is the
    number with the bytes of one of the other dataset, and ``similar_images`` the number similar to one of
    them."""

    path: str
    split: str
    records: int
    root: str
    common_classes: int
    missing_there: int
    missing_here: int
    unbalanced: list[ClassShares]
    equal_images: int
    similar_images: int


def comparison(dataset: Dataset, other: Dataset, across: Duplicates) -> Comparison:
    """Return the comparison of two datasets with the shared images ``across``."""
    mine, theirs = _shares(dataset), _shares(other)
    common = sorted(mine.keys() & theirs.keys())
    balance = [
        ClassShares(name, mine[name][0], theirs[name][0], mine[name][1], theirs[name][1]) for name in common
    ]
    balance.sort(key=lambda one: (-_ratio(one), one.name))
    return Comparison(
        path=os.fspath(other.path),
        split=other.manifest.split,
        records=len(other),
        root=other.manifest.root,
        common_classes=len(common),
        missing_there=len(mine.keys() - theirs.keys()),
        missing_here=len(theirs.keys() - mine.keys()),
        unbalanced=[one for one in balance if _ratio(one) > 1][:MOST_CLASSES_LISTED],
        equal_images=len(np.unique(across.exact["first"])),
        similar_images=len(np.unique(across.near["first"])),
    )


def _shares(dataset: Dataset) -> dict[str, tuple[int, float]]:
    """Return the images of each class that has some, and their share of all."""
    labels = dataset.index["label"]
    counts = np.bincount(labels[labels >= 0], minlength=len(dataset.manifest.labels)).tolist()
    total = max(sum(counts), 1)
    return {
        each.name: (count, count / total)
        for each, count in zip(dataset.manifest.labels.classes, counts, strict=True)
        if count
    }


def _ratio(one: ClassShares) -> float:
    return max(one.share, one.other_share) / min(one.share, one.other_share)


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
        output: File of the page, replaced at once. None writes none: ``save`` the result then.
        against: The folder of another dataset to compare with: images that both have, and the balance of
            their classes.
        pixels: How many images are read: "none", "sample" (at most 4,096 of each dataset are decoded, and the
            bytes of at most 8,192 more compared) or "all" (0.5 to 1.5 ms of CPU and 25 bytes of memory each).
        classes: Names of classes to show many images of; empty shows a few images of up to 24 classes.
        record: Key of the record whose provenance is shown, from its checksum to the root; None is the first.
        seed: Chooses the sample and the images that are shown.
        workers: Number of processes that decode; None is one per usable CPU, 0 decodes in one other process.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The findings.

    Raises:
        UsageError: ``dataset`` is a folder of splits, or ``pixels``, a class or the key is unknown.
        ManifestDamaged, UnknownVersion: A manifest cannot be read.
        OperationError: A process fails, or ``output`` is a folder or a device.
        OSError: A file cannot be read or written.
    """
    with ExitStack() as stack:
        paths = [dataset] if against is None else [dataset, against]
        opened = [stack.enter_context(Dataset(path)) for path in paths]
        examining = _Examiner(opened, pixels, tuple(classes), record, seed)
        count = max(1, usable_cpus() if workers is None else workers)
        pool = stack.enter_context(WorkerPool(count))
        found = examining.result(ImageReading(pool, count, shown(progress)))
    if output is not None:
        found.save(output)
    return found


class _Examiner:
    """One examination of opened datasets. Wrong usage is an error before anything is read."""

    def __init__(
        self, opened: Sequence[Dataset], pixels: str, classes: tuple[str, ...], record: str | None, seed: int
    ) -> None:
        self.custody = custody(opened[0], record)
        self.opened, self.seed = opened, seed
        self.indexes = [one.index if one.manifest.has_images else one.index[:0] for one in opened]
        self.names = RecordNames(opened)
        self.choices, self.looked_at = chosen(self.indexes, pixels, seed)
        self.sheets = contact_sheets(self.names, classes, seed) if len(self.indexes[0]) else []

    def result(self, reading: ImageReading) -> Examination:
        dataset, *others = self.opened
        statistics, *their = (
            reading.statistics(one, choice.records, choice.is_decoded)
            for one, choice in zip(self.opened, self.choices, strict=True)
        )
        codes, across = statistics.all_codes, None
        for one in their:
            other_codes = one.all_codes
            other_codes["record"] += len(dataset)
            across = shared(codes, other_codes)
        is_skipping = dataset.manifest.table(QUARANTINE_NAME) is not None
        skipped = [(one["key"], one["reason"]) for one in quarantined(dataset.path)] if is_skipping else []
        findings = Findings(self.names, self.looked_at, statistics, duplicates(codes), across, skipped)
        found = {
            "dataset": inspect(dataset).to_json(),
            "looked_at": asdict(self.looked_at),
            "classes": [asdict(each) for each in class_counts(dataset)],
            "index": asdict(index_statistics(self.indexes[0], len(dataset.classes), self.seed)),
            "sheets": [asdict(sheet) for sheet in self.sheets],
            "custody": self.custody,
            "pixels": statistics.to_json(),
            "extremes": {
                name: [asdict(self.names.shown(record)) | {"value": value} for value, record in extremes]
                for name, extremes in statistics.extremes.items()
            },
            "observations": [one.to_json() for one in observations(findings)],
            "against": asdict(comparison(dataset, others[0], across)) if across else None,
        }
        return Examination(found, self._pictures(found, reading) if self.looked_at.decoded else {})

    def _pictures(self, found: dict[str, Any], reading: ImageReading) -> Pictures:
        """Return thumbnails of all records that the result names."""
        shown, pictures = set(shown_in(found)), {}
        for which, dataset in zip((THIS, OTHER), self.opened, strict=False):
            records = np.array(sorted(record for where, record in shown if where == which), np.int64)
            made = reading.pictures(dataset, records)
            pictures.update({(which, record): made[record] for record in sorted(made)})
        return pictures
