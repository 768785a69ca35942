"""What an examination points out: a kind of oddity, how many there are, and examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardprep.formats.dataset.dataset import Dataset

from .duplicates import EQUAL_BYTES, Links

MOST_SHOWN = 24  # examples of one kind

THIS, OTHER = "this", "other"


@dataclass(frozen=True)
class ShownRecord:
    """A record as a page names it.

    ``dataset`` is "this", or "other" of a comparison; ``record`` its number, ``key`` and ``label`` its own,
    and ``class_name`` that of the label, None without one. ``width``, ``height`` (pixels) and ``bytes`` are
    the image's. ``note`` says more, such as why it is damaged."""

    dataset: str
    record: int
    key: str
    label: int
    class_name: str | None
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
    first of them."""

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
        return ShownRecord(
            dataset=which,
            record=record,
            key=row["key"].decode("utf-8", "replace"),
            label=label,
            class_name=dataset.manifest.labels.classes[label].name if label >= 0 else None,
            width=int(row["width"]),
            height=int(row["height"]),
            bytes=int(row["length"]),
            note=note,
        )

    def some(self, numbers: Iterable[int]) -> list[ShownRecord]:
        """Return the records of the first of these numbers."""
        return [self.shown(int(number)) for number, _ in zip(numbers, range(MOST_SHOWN), strict=False)]

    def pairs(self, links: Links) -> list[ShownPair]:
        """Return the first of these links."""
        return [
            ShownPair(None if distance == EQUAL_BYTES else distance, (self.shown(first), self.shown(second)))
            for first, second, distance in links[:MOST_SHOWN].tolist()
        ]
