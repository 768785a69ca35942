"""Replayed steps, their pictures, and the point where two runs diverge."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.decode import cv2, encode_png
from shardprep.formats.runtime.files import save_bytes
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.runtime.user_paths import user_path
from shardprep.loaders.batches.stack import rows_of
from shardprep.loaders.loader.digest import digest_of
from shardprep.loaders.loader.run_card import DECIDING_SETTINGS, Differences, RunCard, deciding_differences
from shardprep.loaders.order.epoch import Epoch, EpochPlan, subtract_passed
from shardprep.loaders.order.parts import NO_RECORDS, SCANNED_PLACES, PartOrder, Ranges, Records
from shardprep.loaders.transforms.contract import CHANNELS_FIRST, IMAGE, Transform, TransformInput
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.geometry import ShownPart
from shardprep.loaders.transforms.transforms import Cut, ImageTransform
from shardprep.loaders.transforms.views import Views

ShownParts = tuple[ShownPart | None, ...]


def shown_parts(transform: Transform | None, record: TransformInput, rng: np.random.Generator) -> ShownParts:
    """Return the parts of the image shown by a call with these random numbers; none if it reports none.

    The transform reports them by a method ``shown(record, rng)``, which returns a ShownPart or one per view.
    """
    if (report := getattr(transform, "shown", None)) is None:
        return ()
    parts = report(record, rng)
    if isinstance(parts, ShownPart):
        return (parts,)
    is_valid = isinstance(parts, tuple) and all(isinstance(part, ShownPart | None) for part in parts)
    return parts if is_valid else ()


Kind = Literal["dataset", "order", "labels", "columns", "augmentation", "pixels"]

KINDS: tuple[Kind, ...] = ("order", "labels", "columns", "augmentation")
IMMEDIATE: tuple[Kind, ...] = ("columns", "augmentation")


class RunOrder(NamedTuple):
    """The deliveries of a run, described by its ``card`` and ``plan``.

    ``numbers_at`` maps places of an epoch to record numbers. ``labels`` has the run's labels by record
    number, and ``passed`` the ranges of skipped places by epoch.
    """

    card: RunCard
    plan: EpochPlan
    numbers_at: Callable[[Records, int], Records]
    labels: npt.NDArray[np.int64]
    passed: Mapping[int, Ranges] = {}

    def steps(self, epoch: int, start: int = 0) -> Iterator[Records]:
        """Yield the record numbers of each step of this rank from the place ``start`` on."""
        rest = Epoch(self._plan_of(epoch), epoch, start=start)
        return (self.numbers_at(places, epoch) for places in rest.batches())

    def numbers_between(self, start: int, stop: int, epoch: int) -> Records:
        """Return the record numbers that an epoch delivers to any rank from one place to another."""
        plan = self._plan_of(epoch)
        ends = (subtract_passed(plan.passed, place) for place in (start, stop))
        return self.numbers_at(plan.drop_omitted(plan.order(epoch)[slice(*ends)], epoch), epoch)

    def sightings(
        self, wanted: Iterable[int], epoch: int, start: int = 0, steps: range = range(sys.maxsize)
    ) -> list[Sighting]:
        """Return the deliveries of records to any rank in these steps, counted from the place ``start``.

        Bad records count as delivered. Takes 0.1 s per million records.
        """
        plan, numbers, deliveries = self._plan_of(epoch), np.array([*wanted], np.int64), []
        found = [self._places_of(numbers, plan, part, epoch) for part in plan.order(epoch).parts]
        for rank in range(plan.world_size):
            split = replace(plan, rank=rank).split(subtract_passed(plan.passed, start))
            for number, part in split.parts.items():
                places, records = found[number]
                own = zip(part.steps_of(places).tolist(), records.tolist(), strict=True)
                deliveries += [(step, rank, n) for step, n in own if step in steps and step < len(split)]
        return [Sighting(number, epoch, step, rank, start) for step, rank, number in sorted(deliveries)]

    def _places_of(
        self, numbers: Records, plan: EpochPlan, order: PartOrder, epoch: int
    ) -> tuple[Records, Records]:
        """Return the places of these records in a part of the epoch's order, and the records there."""
        places, records = [NO_RECORDS], [NO_RECORDS]
        for begin in range(0, len(order), SCANNED_PLACES):
            stored = order[begin : begin + SCANNED_PLACES]
            delivered = self.numbers_at(stored, epoch)
            at = np.flatnonzero(np.isin(delivered, numbers))
            at = at[np.isin(stored[at], plan.drop_omitted(stored[at], epoch))]
            places, records = [*places, begin + at], [*records, delivered[at]]
        return np.concatenate(places), np.concatenate(records)

    def _plan_of(self, epoch: int) -> EpochPlan:
        return replace(self.plan, passed=self.passed.get(epoch, ()))


class Sighting(NamedTuple):
    """A delivery of record ``number`` to a ``rank`` at a ``step``, counted from the place ``start``.

    Step and rank are None where a log does not tell with which batch size an epoch began.
    """

    number: int
    epoch: int
    step: int | None
    rank: int | None
    start: int = 0


@dataclass(frozen=True)
class Parting:
    """The first difference between two runs.

    Attributes:
        epoch: Number of the epoch.
        step: Step of the epoch.
        row: Row of the step.
        kind: What differs: the dataset, the order of records, their labels, the columns of a batch, the
            augmentation, or the pixels.
        numbers: The two record numbers; None if a run has no such row, or the datasets differ.
        because: The settings that cause it: name to both values.
    """

    epoch: int
    step: int
    row: int
    kind: Kind
    numbers: tuple[int | None, int | None]
    because: Differences

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        because = {name: list(values) for name, values in self.because.items()}
        return asdict(self) | {"numbers": list(self.numbers), "because": because}


def parting_of_datasets(one: RunCard, other: RunCard) -> Parting | None:
    """Return the parting of runs on different datasets, at the first step; None for the same dataset."""
    if one.dataset == other.dataset:
        return None
    return Parting(0, 0, 0, "dataset", (None, None), {"dataset": (one.dataset, other.dataset)})


def first_parting(
    one: RunOrder,
    other: RunOrder,
    epochs: Iterable[int],
    *,
    pixels: Callable[[int, int], int | None] | None = None,
    step_done: Callable[[], object] = lambda: None,
) -> Parting | None:
    """Return the first difference between two runs in these epochs; None if there is none.

    Different augmentation settings count as a difference from the first record on. With ``pixels`` they do
    not: while records and labels are the same, it is called for the first differing row of each step.
    ``step_done`` is called after each step.
    """
    if parted := parting_of_datasets(one.card, other.card):
        return parted
    causes = {kind: deciding_differences(kind, one.card, other.card) for kind in DECIDING_SETTINGS}
    if one.passed != other.passed:
        causes["order"] |= {"skipped places": (_describe_passed(one), _describe_passed(other))}
    kinds = [kind for kind in KINDS if causes[kind] and not (pixels and kind == "augmentation")]
    if not kinds and not pixels:
        return None
    for epoch in epochs:
        for step, pair in enumerate(zip_longest(one.steps(epoch), other.steps(epoch), fillvalue=NO_RECORDS)):
            rows = dict(_diff_step(one, other, *pair)) | {kind: 0 for kind in IMMEDIATE if kind in kinds}
            if not rows and pixels and (row := pixels(epoch, step)) is not None:
                rows = {"pixels": row}
            if rows:
                kind = min(rows, key=lambda kind: rows[kind])  # of equal rows, the order first
                row = rows[kind]
                first, second = (int(own[row]) if row < len(own) else None for own in pair)
                return Parting(epoch, step, row, kind, (first, second), causes[kind])
            step_done()
    return None


class OrderDifference(NamedTuple):
    """The differences between the orders of two runs, for one rank of each.

    ``differing`` of ``steps`` steps have other records, or the same in another order. ``only_first`` and
    ``only_second`` are the ascending numbers of records that only one run delivers.
    """

    steps: int
    differing: int
    only_first: tuple[int, ...]
    only_second: tuple[int, ...]


def order_difference(one: RunOrder, other: RunOrder, epochs: Iterable[int]) -> OrderDifference:
    """Compare the orders of all steps of these epochs, with a byte of memory per record and run."""
    seen = np.zeros((2, max(len(one.labels), len(other.labels))), np.bool_)
    steps = differing = 0
    for epoch in epochs:
        for pair in zip_longest(one.steps(epoch), other.steps(epoch), fillvalue=NO_RECORDS):
            steps += 1
            differing += not np.array_equal(*pair)
            for delivered, numbers in zip(seen, pair, strict=True):
                delivered[numbers] = True
    first, second = (tuple(np.flatnonzero(a & ~b).tolist()) for a, b in (seen, seen[::-1]))
    return OrderDifference(steps, differing, first, second)


def _describe_passed(order: RunOrder) -> str:
    ranges = ((epoch, *span) for epoch, spans in order.passed.items() for span in spans)
    return ", ".join(f"{start}-{stop - 1} of epoch {epoch}" for epoch, start, stop in ranges) or "none"


def _diff_step(one: RunOrder, other: RunOrder, some: Records, others: Records) -> Iterator[tuple[Kind, int]]:
    """Yield the kinds of difference in a step, each with its first row."""
    common = min(len(some), len(others))
    records = some[:common] != others[:common]
    if records.any() or len(some) != len(others):
        yield "order", int(records.argmax()) if records.any() else common
    labels = one.labels[some[:common]] != other.labels[others[:common]]
    if (labels & ~records).any():
        yield "labels", int((labels & ~records).argmax())


@dataclass(frozen=True)
class ReplayedRecord:
    """One record of a step: its number in the dataset, its key and its label in the loader's label space.

    ``views`` has the part of the image that each view of the transform shows, None for a view that does not
    report it; it is empty if the transform does not. ``skipped`` is the reason why a bad record is not in the
    batch, None for others.
    """

    number: int
    key: str
    label: int
    views: ShownParts = ()
    skipped: str | None = None

    @property
    def shown(self) -> ShownPart | None:
        """The part of the image shown by the transform, or by its first view; None if it is not reported."""
        return self.views[0] if self.views else None

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types, with ``views`` if there are several."""
        unknown: dict[str, Any] = {"crop": None, "mirrored": None}
        shown = [part.to_json() if part else unknown for part in self.views] or [unknown]
        views = {"views": shown} if len(shown) > 1 else {}
        values = {"number": self.number, "key": self.key, "label": self.label}
        return {**values, **shown[0], **views, "skipped": self.skipped}


@dataclass(frozen=True, eq=False)
class Replayed:
    """A rank's batch at a ``step`` of an ``epoch``.

    ``batch`` is bit for bit the tuple that was delivered, with its own memory. ``records`` has the step's
    records in order, including skipped bad ones.
    """

    epoch: int
    step: int
    batch: tuple[Any, ...]
    records: tuple[ReplayedRecord, ...]

    @property
    def delivered(self) -> tuple[ReplayedRecord, ...]:
        """The records of the batch, one for each row."""
        return tuple(record for record in self.records if record.skipped is None)

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The record numbers of the rows: int64 [B]."""
        return np.array([record.number for record in self.delivered], np.int64)

    @property
    def keys(self) -> list[str]:
        """The keys of the rows."""
        return [record.key for record in self.delivered]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The labels of the rows: int64 [B]."""
        return np.array([record.label for record in self.delivered], np.int64)

    @property
    def skipped(self) -> tuple[ReplayedRecord, ...]:
        """The bad records that are not in the batch."""
        return tuple(record for record in self.records if record.skipped is not None)

    def digests(self) -> list[str]:
        """Return a digest of each row's values, 32 hex digits, to compare between machines.

        Raises UsageError for values other than arrays, JSON, and picklable objects.
        """
        return list(map(digest_of, rows_of(self.batch)))

    def digest(self) -> str:
        """Return a digest of the whole batch's values, 32 hex digits."""
        return digest_of(self.digests())

    def first_difference(self, other: Replayed) -> int | None:
        """Return the first row whose values differ from the other step's; None if all are equal."""
        pairs = zip_longest(self.digests(), other.digests())
        return next((row for row, (a, b) in enumerate(pairs) if a != b), None)

    def __len__(self) -> int:
        return len(self.delivered)

    def __iter__(self) -> Iterator[ReplayedRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        bad = f", {len(self.skipped):,} skipped" if self.skipped else ""
        return f"<Replayed step {self.step} of epoch {self.epoch}: {count_of(len(self), 'record')}{bad}>"


Picture = npt.NDArray[np.uint8]


def pictures_of(batch: Sequence[Any], transform: Transform | None) -> list[Picture]:
    """Return the images of a batch, uint8 [height, width, 3] in RGB each, with views side by side.

    They are the batch's first part, or that part's "image". Encoded images and crops are decoded. Normalised
    values are restored to 0..255 with the ``mean`` and ``std`` of the transform; without these, numbers from
    0 to 1 are multiplied by 255, and others are scaled to their range. Raises UsageError for a batch without
    images.
    """
    first = batch[0]
    if isinstance(transform, Cut):
        rows = zip(first["jpeg"], first["crop"], first["mirrored"], strict=True)
        first, transform = [transform.finish(*row) for row in rows], transform.transform
    if isinstance(first, dict):
        if IMAGE not in first:
            raise UsageError("the batch has no images to make a sheet of")
        first = first[IMAGE]
    if not isinstance(transform, Views):
        return [_to_picture(image, transform) for image in first]
    view_transform, shape = transform.view_transforms[0], transform.outputs[0].shape
    views = (values.reshape(-1, *(shape if values.ndim == 3 else shape[1:])) for values in first)
    return [np.hstack([_to_picture(view, view_transform) for view in record]) for record in views]


def _to_picture(image: Any, transform: Transform | None) -> Picture:
    if isinstance(image, bytes | memoryview):
        return decode_rgb(image)
    values = np.asarray(image)
    own = transform if isinstance(transform, ImageTransform) else None
    if own is None and values.ndim == 2:
        values = np.stack([values] * 3, axis=-1)
    looks_first = values.ndim == 3 and values.shape[0] == 3 != values.shape[2]
    if own.layout in CHANNELS_FIRST if own else looks_first:
        values = np.moveaxis(values, 0, -1)
    if values.ndim != 3 or values.shape[2] != 3 or values.dtype.kind not in "uif":
        form = f"{values.dtype}{list(values.shape)}"
        raise UsageError(f"the batch has {form} for each record, which is not an RGB image")
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if own:  # undo the normalisation
        if own.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.astype(np.float64) * own.std + own.mean
    else:
        values = np.nan_to_num(values.astype(np.float64))
        low, high = values.min(initial=0), values.max(initial=0)
        if low < 0 or high > 1:
            values = (values - low) / max(high - low, 1e-9)
    return np.asarray(np.rint((255 * values).clip(0, 255)), np.uint8)


CELL = 160  # pixels per side of a picture
MIN_CELL = 48
MAX_WIDTH = 2400
GAP = 8
LINE_HEIGHT = 14  # pixels from one line of text to the next
FONT_SCALE = 0.36  # of OpenCV's font
TITLE = 26
MAX_PICTURES = 1024  # pictures in a sheet

PAPER, INK, FAINT, BAD = (250,) * 3, (30,) * 3, (110,) * 3, (190, 40, 40)


@dataclass(frozen=True)
class ContactSheet:
    """The contact sheet of a replayed step, as a PNG or a self-contained HTML page; it marks skipped records.

    ``transform`` is the loader's. Raises UsageError for a batch without images, or with more than 1024.
    """

    replayed: Replayed
    transform: Transform | None = None

    def png(self) -> bytes:
        """Return the sheet as a PNG file."""
        return encode_png(self.drawn())

    def html(self) -> str:
        """Return the sheet as an HTML page, with each picture as it is in the batch."""
        from shardprep.formats.reports.pages import page  # start-up time: Jinja

        replayed = self.replayed
        facts = {"records": len(replayed), "skipped": len(replayed.skipped), "digest": replayed.digest()}
        records = [(record, picture is not None and encode_png(picture)) for record, picture in self._shown()]
        return page("step", title=self._title, facts=facts, records=records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.png`` or ``.html`` file, replacing an existing one.

        Raises UsageError for another suffix, OSError, OperationError.
        """
        final = user_path(path).absolute()
        check_suffix(final)
        save_bytes(final, self.png() if final.suffix.lower() == ".png" else self.html().encode())

    def _shown(self) -> list[tuple[ReplayedRecord, Picture | None]]:
        """Return the records of the step with their pictures, None for skipped ones."""
        records = self.replayed.records
        if len(records) > MAX_PICTURES:
            raise UsageError(f"a sheet has at most {MAX_PICTURES} pictures, but the step has {len(records)}")
        pictures = iter(pictures_of(self.replayed.batch, self.transform))
        return [(record, next(pictures) if record.skipped is None else None) for record in records]

    def drawn(self) -> Picture:
        """Return the pixels of the sheet: uint8 [height, width, 3] in RGB."""
        shown = self._shown()
        columns = max(4, math.ceil(math.sqrt(1.4 * len(shown))))  # a little wider than high
        rows = max(1, math.ceil(len(shown) / columns))
        cell = max(MIN_CELL, min(CELL, MAX_WIDTH // columns - GAP))
        height, width = cell + 3 * LINE_HEIGHT + GAP, cell + GAP
        sheet: Picture = np.full((TITLE + GAP + rows * height, GAP + columns * width, 3), PAPER, np.uint8)
        _write_text(sheet, self._title, GAP, TITLE - 8, sheet.shape[1] - 2 * GAP)
        for place, (record, picture) in enumerate(shown):
            row, column = divmod(place, columns)
            x, y = GAP + column * width, TITLE + GAP + row * height
            _draw_picture(sheet, picture, x, y, cell)
            is_bad = record.skipped is not None
            flip = " flip" if record.shown and record.shown.is_mirrored else ""
            caption = "skipped" if is_bad else f"label {record.label}{flip}"
            lines = (record.key, INK), (f"#{record.number}", FAINT), (caption, BAD if is_bad else FAINT)
            for at, (line, colour) in enumerate(lines, 1):
                _write_text(sheet, line, x, y + cell + at * LINE_HEIGHT - 3, cell, colour)
        return sheet

    @property
    def _title(self) -> str:
        replayed = self.replayed
        bad = f", {len(replayed.skipped)} skipped" if replayed.skipped else ""
        return f"epoch {replayed.epoch}, step {replayed.step}: {count_of(len(replayed), 'record')}{bad}"


def check_suffix(path: Path) -> None:
    """Raise UsageError unless a sheet's name ends in .png or .html."""
    if path.suffix.lower() not in (".png", ".html"):
        raise UsageError("a sheet is a .png or .html file; use one of these suffixes", path=path)


def _draw_picture(sheet: Picture, picture: Picture | None, x: int, y: int, cell: int) -> None:
    """Draw a picture centred in its cell; without one, a crossed frame."""
    if picture is None:
        cv2.rectangle(sheet, (x, y), (x + cell - 1, y + cell - 1), BAD)
        cv2.line(sheet, (x, y), (x + cell - 1, y + cell - 1), BAD)
        return
    height, width = picture.shape[:2]
    scale = cell / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    shown = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST)
    left, top = x + (cell - size[0]) // 2, y + (cell - size[1]) // 2
    sheet[top : top + size[1], left : left + size[0]] = shown


def _write_text(sheet: Picture, text: str, x: int, y: int, width: int, colour: Sequence[int] = INK) -> None:
    """Write text, shortened in its middle to ``width`` pixels."""
    ascii_text = text.encode("ascii", "replace").decode()
    shown, length = ascii_text, len(ascii_text)
    while cv2.getTextSize(shown, cv2.FONT_HERSHEY_SIMPLEX, FONT_SCALE, 1)[0][0] > width:
        length -= 1
        shown = f"{ascii_text[: length // 3]}..{ascii_text[len(ascii_text) - (length - length // 3) :]}"
    cv2.putText(sheet, shown, (x, y), cv2.FONT_HERSHEY_SIMPLEX, FONT_SCALE, tuple(colour), 1, cv2.LINE_AA)
