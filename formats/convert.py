"""Conversion: from a source to published shards and, last of all, their manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .board import BOARD_NAME, Board
from .box_table import GatheredBoxes, gather
from .build import BuiltShard, ShardJob, shard_jobs
from .errors import PlanMismatch, SourceIncomplete, UsageError
from .filesystem import check_space, refuse_network
from .finish import finish
from .manifest import MANIFEST_NAME, Manifest, read_manifest
from .plan import Plan, PlanOptions, plan
from .progress import Progress, Silent
from .recognise import recognise
from .run_jobs import run_jobs
from .source import Listing, Source
from .verify import verify
from .workplace import WORKPLACE_NAME, Workplace, refuse_busy


@dataclass(frozen=True)
class Converted:
    """One split that is done: where it is, its manifest, and whether there was anything to do."""

    path: Path
    manifest: Manifest
    already_complete: bool


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert: nothing here changes a byte of the output.

    ``allow_partial`` accepts a wrong number of images, ``restart`` discards unfinished work,
    ``check_md5`` also reads official archives whole, ``allow_network_fs`` builds LMDB even there.
    """

    allow_partial: bool = False
    restart: bool = False
    check_md5: bool = False
    allow_network_fs: bool = False


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Converted]:
    """Convert one split into ``output``, or every split found into ``output/<split>``.

    Killed at any point, the same call finishes the job; the result is byte-identical to an
    unbroken run with any number of workers. ``workers`` is the number of processes (0: this one,
    None: one per usable CPU); an ``executor`` runs the shard jobs instead, and is left open. Raises
    ShardprepError (see errors.py) and OSError.
    """
    options = options or ConvertOptions()
    progress = progress or Silent()
    recognised = recognise(Path(source), split=split, check_md5=options.check_md5)
    progress.note(f"source: {recognised.description}")
    splits = (split,) if split else recognised.splits
    outputs = {name: Path(output) if split else Path(output) / name for name in splits}
    for path in outputs.values():
        refuse_busy(path)
    run = partial(run_jobs, workers=workers, executor=executor, progress=progress)
    conversion = _Conversion(recognised, plan_options or PlanOptions(), options, run, progress)
    return [conversion.convert(name, path) for name, path in outputs.items()]


@dataclass(frozen=True)
class _Conversion:
    """What is the same for every split of one source."""

    source: Source
    plan_options: PlanOptions
    options: ConvertOptions
    run: Callable[[Iterable[ShardJob], Board], list[BuiltShard]]
    progress: Progress

    def convert(self, split: str, output: Path) -> Converted:
        listing = self.source.listing(split)
        _check_count(listing, allow_partial=self.options.allow_partial)
        planned = plan(listing, self.plan_options)
        boxes = gathered_boxes(self.source, split, listing)
        if (output / MANIFEST_NAME).exists():
            return _already_there(output, planned, self.progress)
        self._check_output(output, planned)
        with Workplace(output) as workplace:
            if self.options.restart:
                workplace.discard()
            workplace.claim(_guard(planned, listing, boxes))
            built = self._build(planned, listing, workplace)
            manifest = finish(workplace, planned, listing, built, boxes)
        return Converted(output, manifest, already_complete=False)

    def _check_output(self, output: Path, planned: Plan) -> None:
        check_output(output, self.source)
        if not self.options.allow_network_fs:
            refuse_network(output, planned.options.container)
        check_space(output, planned)

    def _build(self, planned: Plan, listing: Listing, workplace: Workplace) -> list[BuiltShard]:
        board = Board(workplace.folder / BOARD_NAME, planned.shards)
        jobs = shard_jobs(planned, planned.shards, listing.reader, workplace.output)
        records, total = len(planned.order), int(planned.entries["length"].sum())
        with self.progress.task(f"convert {planned.split}", records=records, size=total):
            return self.run(jobs, board)


def _check_count(listing: Listing, *, allow_partial: bool) -> None:
    found = len(listing.entries)
    if listing.expected not in (None, found) and not allow_partial:
        detail = f" ({listing.shortfall})" if listing.shortfall else ""
        raise SourceIncomplete(
            f"the split {listing.split} has {found} images, not {listing.expected}{detail}; "
            "add --allow-partial to convert what is there"
        )


def gathered_boxes(source: Source, split: str, listing: Listing) -> GatheredBoxes | None:
    """The boxes of a split, all read; None where there are none."""
    boxes = source.boxes(split)
    return None if boxes is None else gather(boxes, listing.labels)


def check_output(output: Path, source: Source) -> None:
    """Refuse a folder that is part of the source, or holds anything but our own unfinished work."""
    for folder in source.folders:
        if output.resolve().is_relative_to(folder):
            raise UsageError(
                "lies in the source, where the next run would find it; choose another", path=output
            )
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError("is not a folder", path=output)
    begun = (output / WORKPLACE_NAME).exists()
    if not begun and any(output.iterdir()):
        raise UsageError("is not empty, and not a conversion begun here; choose another output", path=output)


def _already_there(output: Path, planned: Plan, progress: Progress) -> Converted:
    """A finished output: nothing to do if it is this plan's and intact."""
    manifest = read_manifest(output)
    if manifest.plan.get("sha256") != planned.digest:
        raise PlanMismatch(
            "holds a finished dataset of another plan (other options or another source); "
            "choose another output, or remove it",
            path=output,
        )
    progress.note(f"{output} is complete already; verifying it")
    report = verify(output, level="full", progress=progress)
    report.raise_for_findings()
    if (output / WORKPLACE_NAME).exists():
        with Workplace(output) as workplace:
            workplace.remove()
    return Converted(output, manifest, already_complete=True)


def _guard(planned: Plan, listing: Listing, boxes: GatheredBoxes | None) -> dict[str, Any]:
    """What must not differ when a conversion is resumed, under names for people."""
    times = hashlib.sha256()
    for start in range(0, len(planned.order), 1 << 16):
        rows = planned.order[start : start + (1 << 16)]
        for column in ("path", "offset", "mtime_ns"):
            times.update(planned.entries[column][rows].tobytes())
    options = {name.replace("_", " "): value for name, value in asdict(planned.options).items()}
    archives = [[a.name, a.size, a.mtime_ns] for a in listing.archives]
    return options | {
        "split": planned.split,
        "source": [archives, times.hexdigest()],
        "images": planned.digest,
        "boxes": boxes.digest if boxes else None,
    }
