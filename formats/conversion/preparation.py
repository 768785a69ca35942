"""The preparation of a conversion: each split is listed, planned and checked before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardprep.formats.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.errors import PlanMismatch, SourceIncomplete
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Listing, Source

from .plan import Plan, PlanOptions, plan
from .preflight import check_output, check_space, refuse_network
from .tables import GatheredBoxes, gathered_boxes


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion that do not change the bytes of its output.

    ``allow_partial`` accepts a wrong number of images; ``restart`` discards unfinished work;
    ``check_md5`` reads official archives whole and checks their MD5; ``allow_network_fs`` builds LMDB
    on a network file system, too. All are False by default.
    """

    allow_partial: bool = False
    restart: bool = False
    check_md5: bool = False
    allow_network_fs: bool = False


@dataclass(frozen=True)
class Prepared:
    """One split, listed and planned; ``output`` is the folder of its dataset."""

    output: Path
    listing: Listing
    planned: Plan
    boxes: GatheredBoxes | None

    @property
    def is_finished(self) -> bool:
        """Whether the output has a manifest, by now."""
        return (self.output / MANIFEST_NAME).exists()

    def finished_manifest(self) -> Manifest:
        """Return the finished output's manifest. Raises PlanMismatch if it is of another plan, DataError."""
        manifest = read_manifest(self.output)
        if manifest.plan.get("sha256") != self.planned.digest:
            raise PlanMismatch(
                "holds a finished dataset of another plan (other options or another source); "
                "choose another output, or remove it",
                path=self.output,
            )
        return manifest

    def guard(self) -> dict[str, Any]:
        """Return what must be equal when a conversion is resumed, by names that the user understands."""
        planned = self.planned
        times = hashlib.sha256()
        for start in range(0, len(planned.order), 1 << 16):
            rows = planned.order[start : start + (1 << 16)]
            for column in ("path", "offset", "mtime_ns"):
                times.update(planned.entries[column][rows].tobytes())
        options = {name.replace("_", " "): value for name, value in asdict(planned.options).items()}
        archives = [[a.name, a.size, a.mtime_ns] for a in self.listing.archives]
        options |= {name.replace("_", " "): value for name, value in self.listing.options.items()}
        return options | {
            "split": planned.split,
            "source": [archives, times.hexdigest()],
            "images": planned.digest,
            "boxes": self.boxes.digest if self.boxes else None,
        }


def prepare(
    source: Source,
    outputs: Mapping[str, Path],
    plan_options: PlanOptions,
    options: ConvertOptions,
    problems: Problems,
) -> list[Prepared]:
    """Return the splits without problems; write nothing.

    ``outputs`` maps a split to its folder. A problem with one split or output is added to ``problems``, and
    the other splits are prepared all the same.
    """
    listings = _listings(source, outputs, problems)
    prepared = []
    for listing in listings:
        with problems.collected():
            _check_count(listing, allow_partial=options.allow_partial)
        with problems.collected():
            boxes = gathered_boxes(source, listing.split, listing)
            planned = plan(listing, plan_options)
            prepared.append(Prepared(outputs[listing.split], listing, planned, boxes))
    for one in prepared:
        if one.is_finished:
            with problems.collected():
                one.finished_manifest()
    _check_outputs(source, [one for one in prepared if not one.is_finished], options, problems)
    return prepared


def _listings(source: Source, splits: Iterable[str], problems: Problems) -> list[Listing]:
    listings = []
    for split in splits:
        with problems.collected():
            listings.append(source.survey(split))
    for found in dict.fromkeys(listing.problems for listing in listings):  # parts of one listing share theirs
        problems.merge(found)
    return listings


def _check_outputs(
    source: Source, prepared: list[Prepared], options: ConvertOptions, problems: Problems
) -> None:
    for one in prepared:
        with problems.collected():
            check_output(one.output, source)
        if not options.allow_network_fs:
            with problems.collected():
                refuse_network(one.output, one.planned.options.container)
    with problems.collected():
        check_space({one.output: one.planned for one in prepared})


def _check_count(listing: Listing, *, allow_partial: bool) -> None:
    found = len(listing.entries)
    if listing.expected not in (None, found) and not allow_partial:
        detail = f" ({listing.shortfall})" if listing.shortfall else ""
        raise SourceIncomplete(
            f"the split {listing.split} has {found} images, not {listing.expected}{detail}; "
            "add --allow-partial to convert what is there"
        )
