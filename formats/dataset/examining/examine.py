"""The examination of a dataset: its index, its pixels, and another dataset beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.manifest import QUARANTINE_NAME
from shardprep.formats.dataset.summary import class_counts, summarise
from shardprep.formats.dataset.verification.manifest_claims import quarantined
from shardprep.formats.processes.worker_pool import WorkerPool, usable_cpus
from shardprep.formats.progress import Progress, shown

from .choice import chosen
from .comparison import comparison
from .custody import custody
from .duplicates import Duplicates, duplicates, shared
from .examination import Examination, Pictures, shown_in
from .index_statistics import index_statistics
from .observation import OTHER, THIS, RecordNames
from .observations import Findings, observations
from .pixels.image_reading import ImageReading
from .pixels.pixel_statistics import PixelStatistics
from .sheets import contact_sheets


def examine(
    dataset: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    pixels: str = "sample",
    classes: Sequence[str] = (),
    record: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Look at what is in a dataset. The result is the same for any number of workers.

    ``dataset`` is its folder. ``against`` is the folder of another dataset to compare it with: images that
    both have, and the balance of their classes. ``pixels`` is how many images are read: "none", "sample" (at
    most 4,096 of each dataset are decoded, and the bytes of at most 8,192 more compared) or "all" (0.5 to 1.5
    ms of CPU and 25 bytes of memory per image). ``classes`` are names of classes to show many images of;
    without any, a few images of up to 24 classes are shown. ``record`` is the key of the record of which the
    custody is told, from its checksum over its shard to the root; None is the first one. ``seed`` chooses the
    sample and what is shown. ``workers`` is the number of processes that decode; None is one per usable CPU,
    and 0 decodes in one other process. ``progress`` receives the progress; None shows a bar in a notebook.

    Damaged images and shards are observations, not errors. Raises ManifestDamaged, UnknownVersion, OSError;
    UsageError for a folder of splits, unknown ``pixels``, classes and keys; OperationError if processes
    fail."""
    with ExitStack() as stack:
        paths = [dataset] if against is None else [dataset, against]
        opened = [stack.enter_context(Dataset(path)) for path in paths]
        examining = _Examining(opened, pixels, tuple(classes), record, seed)
        count = max(1, usable_cpus() if workers is None else workers)
        pool = stack.enter_context(WorkerPool(count))
        return examining.result(ImageReading(pool, count, shown(progress)))


def report(
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    pixels: str = "sample",
    classes: Sequence[str] = (),
    record: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Write what :func:`examine` finds to a page, and return it.

    ``output`` is the file of the page, which is replaced at once. ``dataset``, ``against``, ``pixels``,
    ``classes``, ``record``, ``seed``, ``workers`` and ``progress`` are as for :func:`examine`, and so are the
    errors; OperationError if ``output`` is a folder or a device, OSError if it cannot be written."""
    found = examine(
        dataset,
        against=against,
        pixels=pixels,
        classes=classes,
        record=record,
        seed=seed,
        workers=workers,
        progress=progress,
    )
    found.save(output)
    return found


class _Examining:
    """One examination of opened datasets. What is wrong in its usage is an error before anything is read."""

    def __init__(
        self, opened: Sequence[Dataset], pixels: str, classes: tuple[str, ...], record: str | None, seed: int
    ) -> None:
        self.custody = custody(opened[0], record)
        self.opened, self.seed = opened, seed
        self.indexes = [_images(dataset) for dataset in opened]
        self.names = RecordNames(opened)
        self.choices, self.looked_at = chosen(self.indexes, pixels, seed)
        self.sheets = contact_sheets(self.names, classes, seed) if len(self.indexes[0]) else []

    def result(self, reading: ImageReading) -> Examination:
        statistics = [
            reading.statistics(dataset, choice.records, choice.is_decoded)
            for dataset, choice in zip(self.opened, self.choices, strict=True)
        ]
        inside, across = _duplicates(statistics, len(self.opened[0]))
        found = {
            **self._facts(),
            **self._pixels(statistics[0]),
            "observations": self._observed(statistics[0], inside, across),
            "against": asdict(comparison(self.opened[0], self.opened[1], across)) if across else None,
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

    def _facts(self) -> dict[str, Any]:
        """What the manifest and the index say."""
        dataset = self.opened[0]
        return {
            "dataset": summarise(dataset).to_json(),
            "looked_at": asdict(self.looked_at),
            "classes": [asdict(each) for each in class_counts(dataset)],
            "index": asdict(index_statistics(self.indexes[0], len(dataset.classes), self.seed)),
            "sheets": [asdict(sheet) for sheet in self.sheets],
            "custody": self.custody,
        }

    def _pixels(self, statistics: PixelStatistics) -> dict[str, Any]:
        extremes = {
            name: [asdict(self.names.shown(record)) | {"value": value} for value, record in found]
            for name, found in statistics.extremes.items()
        }
        return {"pixels": statistics.to_json(), "extremes": extremes}

    def _observed(
        self, statistics: PixelStatistics, inside: Duplicates, across: Duplicates | None
    ) -> list[dict[str, Any]]:
        skipped = _skipped(self.opened[0])
        findings = Findings(self.names, self.looked_at, statistics, inside, across, skipped)
        return [one.to_json() for one in observations(findings)]


def _images(dataset: Dataset) -> Rows:
    """Return the rows of the records with images: all, or none."""
    return dataset.index if dataset.manifest.has_images else dataset.index[:0]


def _duplicates(statistics: Sequence[PixelStatistics], first: int) -> tuple[Duplicates, Duplicates | None]:
    """Return the duplicates within the first dataset, which has ``first`` records, and those across."""
    codes = statistics[0].all_codes
    if len(statistics) == 1:
        return duplicates(codes), None
    others = statistics[1].all_codes
    others["record"] += first
    return duplicates(codes), shared(codes, others)


def _skipped(dataset: Dataset) -> list[tuple[str, str]]:
    if dataset.manifest.table(QUARANTINE_NAME) is None:
        return []
    return [(one["key"], one["reason"]) for one in quarantined(dataset.path)]
