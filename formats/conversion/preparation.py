"""The preparation of a conversion: each split is listed, planned and checked before anything is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.containers.registry import IN_PLACE, container
from shardprep.formats.conversion.building.part import ConversionPart
from shardprep.formats.conversion.building.plan import Plan, PlannedShard, PlanOptions, differences, plan
from shardprep.formats.conversion.building.work_folder import refuse_busy, refuse_other_plan
from shardprep.formats.dataset.manifest import MANIFEST_NAME, WORK_FOLDER_NAME, Manifest, read_manifest
from shardprep.formats.errors import PlanMismatch, SourceIncomplete, UsageError
from shardprep.formats.progress import Progress
from shardprep.formats.records.stored_order import ITEM_ORDERS, ORDERS
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Listing, Source
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.stored_entries import StoredEntries
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.system.storage.location import SCHEMES, Location, path_or_place, redacted
from shardprep.formats.system.user_path import user_path

from .preflight import check_output, check_space, refuse_network, refuse_other_shape
from .tables import GatheredBoxes, gathered_boxes

MOST_NAMED = 5  # classes in one line
IN_PLAN = ("key", "label", "length")  # columns of the entries that the plan's digest covers


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
class Request:
    """The arguments of a conversion, as in :func:`.convert.convert`; ``part`` is None for all of it.

    ``kept_shards`` is the number of shards that lie in the output at a time, None for all.
    """

    source: Path | Location
    output: Path
    split: str | None
    plan_options: PlanOptions
    options: ConvertOptions
    source_options: SourceOptions
    part: ConversionPart | None = None
    kept_shards: int | None = None

    def __post_init__(self) -> None:
        if self.part and isinstance(self.source, Location):
            raise UsageError("is a URL, from which no part is converted alone", path=self.source.url)
        if self.plan_options.order in ITEM_ORDERS:
            raise UsageError(
                f"a conversion's order is one of {', '.join(ORDERS)}, not {self.plan_options.order}"
            )

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        split: str | None,
        plan_options: PlanOptions | None,
        options: ConvertOptions | None,
        source_options: SourceOptions | None,
        part: tuple[int, int] | None = None,
    ) -> Request:
        """Return the request of a caller: options that are None take their defaults. Raises UsageError."""
        if (url := os.fspath(output)).partition(":/")[0] in SCHEMES:
            raise UsageError("is a URL, and convert_to_url() converts to these", path=redacted(url))
        return cls(
            path_or_place(source),
            user_path(output),
            split,
            plan_options or PlanOptions(),
            options or ConvertOptions(),
            source_options or SourceOptions(),
            ConversionPart(*part) if part else None,
        )

    def recognised(self) -> Source:
        """Return the source. Raises UsageError, DataError, OSError."""
        return recognise(
            self.source,
            split=self.split,
            check_md5=self.options.check_md5,
            options=self.source_options,
            seed=self.plan_options.seed,
        )

    def outputs(self, source: Source) -> dict[str, Path]:
        """Return the folder of each split that is asked for."""
        if self.split:
            return {self.split: self.output}
        return {split: self.output / split for split in source.splits}

    def kept(self, prepared: Prepared) -> Iterable[PlannedShard]:
        """Return shards that take as much room as those of a split that lie in the output at a time."""
        if self.kept_shards is None:
            return prepared.shards
        return nlargest(self.kept_shards, prepared.shards, key=lambda shard: shard.extent.payload_bytes)

    def check_outputs(self, source: Source) -> None:
        """Raise UsageError for an output of another shape, and OutputBusy for one that is in use."""
        refuse_other_shape(self.output, self.split)
        for path in self.outputs(source).values():
            refuse_busy(path, shared=self.part is not None)

    def survey(self, source: Source, split: str, output: Path) -> Listing:
        """Return a split's survey; a part of this conversion may have read the archive's headers already."""
        if self.options.restart or not (output / WORK_FOLDER_NAME).is_dir():
            return source.survey(split)
        known_by = source.known_by(split)
        entries = None if known_by is None else StoredEntries(output / WORK_FOLDER_NAME, known_by).read()
        return source.survey(split) if entries is None else source.survey_of(split, entries)


@dataclass(frozen=True)
class Prepared:
    """One split, listed and planned; ``output`` is the folder of its dataset.

    ``shards`` are those of the plan that are to be built: all, or the share of one part.
    """

    output: Path
    listing: Listing
    planned: Plan
    boxes: GatheredBoxes | None
    shards: tuple[PlannedShard, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the output has a manifest, by now."""
        return (self.output / MANIFEST_NAME).exists()

    def finished_manifest(self) -> Manifest:
        """Return the finished output's manifest. Raises PlanMismatch if it is of another plan, DataError."""
        manifest = read_manifest(self.output)
        self.refuse_other(manifest, self.output)
        return manifest

    def refuse_other(self, manifest: Manifest, place: str | os.PathLike[str]) -> None:
        """Raise PlanMismatch if the finished dataset at a place is of another plan."""
        if differing := self._differing(manifest):
            raise PlanMismatch(
                f"holds a finished dataset: {differing}; choose another folder, or remove this one",
                path=place,
            )

    def _differing(self, manifest: Manifest) -> str:
        """Say how a finished dataset's plan differs; the policy for bad images counts if any was skipped.

        Options of the source count only where they made other images.
        """
        policy = self.planned.options.on_bad_image if manifest.skipped else manifest.plan["on_bad_image"]
        begun = {"images" if name == "sha256" else name: value for name, value in manifest.plan.items()}
        now = self.planned.options.to_json() | {
            "on_bad_image": policy,
            "images": self.planned.digests.get(policy),
        }
        if begun["images"] != now["images"]:
            begun |= SourceOptions.of_manifest(manifest.source).in_use
            now |= self.listing.options
        return differences(begun, now)

    def guard(self) -> dict[str, Any]:
        """Return what must be equal when a conversion is resumed, by names that the user understands."""
        planned = self.planned
        times = hashlib.sha256()
        for start in range(0, len(planned.order), 1 << 16):
            rows = planned.order[start : start + (1 << 16)]
            for column in (name for name in planned.entries.dtype.names or () if name not in IN_PLAN):
                times.update(planned.entries[column][rows].tobytes())
        options = planned.options.to_json() | dict(self.listing.options)
        del options["on_bad_image"]  # it only concerns shards that are not built
        return options | {
            "split": planned.split,
            "source": [[archive.state for archive in self.listing.archives], times.hexdigest()],
            "images": planned.work_digest,
            "boxes": self.boxes.digest if self.boxes else None,
            "writer": self._writer(),
        }

    def _writer(self) -> str:
        """Return the versions and settings that decide the bytes of the shards besides plan and images."""
        used = {"shardprep": version("shardprep"), **container(self.planned.options.container).library()}
        return ", ".join(f"{name} {value}" for name, value in used.items())


def prepare(source: Source, request: Request, problems: Problems) -> list[Prepared]:
    """Return the splits that can be planned; write nothing.

    A problem with one split or output is added to ``problems``, and the others are prepared all the same.
    """
    outputs = request.outputs(source)
    prepared = []
    for listing in _listings(source, request, outputs, problems):
        miscounted = Problems()
        with miscounted.collected():
            _check_count(listing, allow_partial=request.options.allow_partial)
        problems.merge(miscounted)
        if not len(listing.entries) and (miscounted or listing.problems):
            continue  # why there is no image is said
        with problems.collected():
            _check_in_place(listing, request.plan_options)
            boxes = gathered_boxes(source, listing.split, listing)
            planned = plan(listing, request.plan_options)
            prepared.append(Prepared(outputs[listing.split], listing, planned, boxes, planned.shards))
    if request.part:
        shares = request.part.shares(one.planned for one in prepared)
        prepared = [replace(one, shards=share) for one, share in zip(prepared, shares, strict=True)]
    for one in prepared:
        _check_output(one, source, request.options, problems)
    with problems.collected():
        begun = [one for one in prepared if not one.is_finished]
        check_space(
            {one.output: (one.planned, request.kept(one)) for one in begun}, alone=request.part is None
        )
    return prepared


def note_untrained(prepared: Iterable[Prepared], progress: Progress) -> None:
    """Show the classes of val of which train has no image: a folder's name may be misspelt."""
    of_split = {one.planned.split: one for one in prepared}
    if not {"train", "val"} <= of_split.keys():
        return
    val, train = (of_split[split].listing for split in ("val", "train"))
    only_val = np.setdiff1d(val.entries["label"], train.entries["label"])
    names = [val.labels.classes[label].name for label in only_val.tolist() if label >= 0]
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        named = ", ".join(names[:MOST_NAMED])
        progress.note(f"classes of val without an image in train: {named}{more}")


def _listings(
    source: Source, request: Request, outputs: Mapping[str, Path], problems: Problems
) -> list[Listing]:
    listings = []
    for split, output in outputs.items():
        with problems.collected():
            listings.append(request.survey(source, split, output))
    for found in dict.fromkeys(listing.problems for listing in listings):  # parts of one listing share theirs
        problems.merge(found)
    return listings


def _check_output(one: Prepared, source: Source, options: ConvertOptions, problems: Problems) -> None:
    if one.is_finished:
        with problems.collected():
            one.finished_manifest()
        return
    with problems.collected():
        check_output(one.output, source.folders)
        if not options.restart:
            refuse_other_plan(one.output, one.guard())
    if not options.allow_network_fs:
        with problems.collected():
            refuse_network(one.output, one.planned.options.container)


def _check_in_place(listing: Listing, options: PlanOptions) -> None:
    """Raise UsageError for images that are to stay in their archive and are in none."""
    if options.container == IN_PLACE and listing.reader.archive is None:
        raise UsageError(
            f"the images of {listing.split} are not in one of the official tars, in which alone they can stay; "
            "convert them with prep convert"
        )


def _check_count(listing: Listing, *, allow_partial: bool) -> None:
    found = len(listing.entries)
    if listing.expected not in (None, found) and not allow_partial:
        detail = f" ({listing.shortfall})" if listing.shortfall else ""
        raise SourceIncomplete(
            f"the split {listing.split} has {found} images, not {listing.expected}{detail}; "
            "add --allow-partial to convert what is there"
        )
