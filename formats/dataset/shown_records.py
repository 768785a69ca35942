"""Some of a dataset's records, to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shardprep.formats.errors import UsageError
from shardprep.formats.images.gallery import MOST_SHOWN, Gallery, ShownImage
from shardprep.formats.records.record import Record


class ClassifiedRecords(Protocol):
    """Records by number, and the names of their classes: a Dataset."""

    path: Path
    index: Any

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record: ...


def shown_records(dataset: ClassifiedRecords, records: int | Sequence[int]) -> Gallery:
    """Return these records, or so many that are evenly chosen. Raises UsageError for more than 100."""
    numbers = _evenly(records, len(dataset)) if isinstance(records, int) else records
    if not 0 <= len(numbers) <= MOST_SHOWN or (isinstance(records, int) and records < 1):
        raise UsageError(f"{records} cannot be shown; give 1 to {MOST_SHOWN} records")
    shown = [_shown(dataset, range(len(dataset))[number]) for number in numbers]
    of = "record" if len(dataset) == 1 else "records"
    return Gallery(f"{dataset.path}: {len(shown)} of {len(dataset):,} {of}", shown)


def _evenly(count: int, records: int) -> Sequence[int]:
    count = min(count, records)
    return [place * records // count for place in range(count)] if count <= MOST_SHOWN else range(count)


def _shown(dataset: ClassifiedRecords, number: int) -> ShownImage:
    record, label = dataset[number], int(dataset.index["label"][number])
    named = f", {dataset.classes[label]}" if label >= 0 else ""
    return ShownImage(record.image, f"{number:,}: {record.key}{named}")
