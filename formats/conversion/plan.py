"""The plan: the order of the images, and their shards. A pure function of listing and options."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, SourceDamaged, UsageError
from shardprep.formats.images.header import DEFAULT_QUALITY, MAX_GROWTH
from shardprep.formats.records.record import (
    ARCHIVE_ORDER,
    GIVEN,
    ITEM_ORDERS,
    ORDERS,
    is_class_sorted,
    permutation,
)
from shardprep.formats.records.schema import BadValue
from shardprep.formats.runtime.jobs import Unit, other_machine_error, refuse_other_versions
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import check_flags, check_int, check_seed
from shardprep.formats.shards.manifest import FORMAT_VERSION, PLAN
from shardprep.formats.shards.read import ALL_CONTAINERS, IN_PLACE, SUFFIXES, Region, container
from shardprep.formats.sources.source import ByteReader, Entries, Listing, WholeArchive

BAD_IMAGE_POLICIES = ("fail", "skip")
DEFAULT_SHARD_SIZE = 256 << 20
MAX_SHORTER_SIDE = 8192


@dataclass(frozen=True)
class PlanOptions:
    """Options of a conversion that decide the bytes of its output.

    Images keep their bytes unless ``crop_ready`` or ``shorter_side`` is given.

    Args:
        container: "lmdb" or "hdf5"; "tar" for images that stay in the official tar, in the order "archive".
        shard_size: Image bytes per shard, at most 4 GiB.
        order: "shuffled", a permutation by ``seed``; "key", sorted by key; or "source", sorted by file and
            place in it. Images that stay in their archive have "archive", saved items "given" or
            "given-shuffled".
        seed: Seed of the order, 0 to 2**64 - 1.
        on_bad_image: "fail" raises BadImage; "skip" leaves the image out and lists it in quarantine.json.
        decode_check: Whether an image that does not decode is a bad image, too.
        crop_ready: Whether to re-encode JPEGs losslessly in segments, so that crops decode without the rest.
        shorter_side: Pixels of the shorter side to which larger images are shrunk and encoded as crop-ready
            JPEGs, which is lossy; None keeps their size.
        quality: JPEG quality for ``shorter_side``, 1 to 100.

    Raises:
        UsageError: A value is invalid.
    """

    container: str = "lmdb"
    shard_size: int = DEFAULT_SHARD_SIZE
    order: str = "shuffled"
    seed: int = 0
    on_bad_image: str = "fail"
    decode_check: bool = False
    crop_ready: bool = False
    shorter_side: int | None = None
    quality: int = DEFAULT_QUALITY

    def __post_init__(self) -> None:
        orders = (ARCHIVE_ORDER,) if self.container == IN_PLACE else (*ORDERS, *ITEM_ORDERS)
        choices = {"container": ALL_CONTAINERS, "order": orders, "on_bad_image": BAD_IMAGE_POLICIES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        numbers = {"shard_size": check_int(self.shard_size, "the shard size", least=1)}
        if numbers["shard_size"] > 4 << 30:
            raise UsageError(f"the shard size must be between 1 byte and 4 GiB, not {self.shard_size}")
        if self.container == IN_PLACE and self.transcodes:
            raise UsageError("images that stay in their archive cannot be re-encoded")
        numbers["quality"] = check_int(self.quality, "the quality", least=1, most=100)
        if self.shorter_side is not None:
            side = check_int(self.shorter_side, "the shorter side", least=1, most=MAX_SHORTER_SIDE)
            numbers["shorter_side"] = side
        elif self.quality != DEFAULT_QUALITY:
            raise UsageError("the quality only applies to images that --shorter-side shrinks; give it, too")
        flags = {"decode_check": self.decode_check, "crop_ready": self.crop_ready}
        check_flags(**flags)
        # as Python's integers and booleans, for JSON
        vars(self).update(numbers, seed=check_seed(self.seed), **{name: bool(flags[name]) for name in flags})

    @property
    def transcodes(self) -> bool:
        """Whether stored images may have different bytes than in the source."""
        return self.crop_ready or self.shorter_side is not None

    @property
    def transcoder(self) -> str:
        """The programs that re-encode images, and their versions, if any do. Raises OperationError."""
        # Imported here because OpenCV takes 40 MB.
        from shardprep.formats.images.crop_ready import encoder_version, jpegtran_version

        programs = [jpegtran_version()] if self.crop_ready else []
        return "; ".join([*programs, encoder_version()] if self.shorter_side is not None else programs)

    def to_json(self) -> dict[str, Any]:
        """Return the options that every manifest has, and of later ones those in use, to keep the roots."""
        values = {n: v for n, v in asdict(self).items() if n in PLAN or v != getattr(PlanOptions, n)}
        if self.shorter_side is not None:
            values["quality"] = self.quality
        return values | ({"transcoder": self.transcoder} if self.transcodes else {})


@dataclass(frozen=True)
class Plan:
    """A whole conversion, in which ``entries[order[i]]`` is the record at position *i* of the output.

    ``digests`` maps each policy for bad images to the digest of the plan with that policy.
    """

    listing: Listing
    options: PlanOptions
    order: npt.NDArray[np.uint32]
    shards: tuple[Unit, ...]
    key_bytes: int
    class_sorted: bool
    digests: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 of all that decides the output, except the images' bytes."""
        return self.digests[self.options.on_bad_image]

    @property
    def work_digest(self) -> str:
        """The digest of unfinished work: shards without bad images are the same for any policy."""
        return self.digests[BAD_IMAGE_POLICIES[0]]

    @property
    def has_labels(self) -> bool:
        return bool((self.listing.entries["label"] >= 0).any())

    @property
    def in_place(self) -> WholeArchive | None:
        """The archive in which the images stay; None if the shards contain them."""
        return self.listing.reader.archive if self.options.container == IN_PLACE else None

    @property
    def regions(self) -> tuple[Region, ...]:
        """Each shard's region of the archive in which the images stay; empty without one.

        A region ends with the shard's last image, and the last one with the archive.
        """
        if (archive := self.in_place) is None:
            return ()
        last = self.listing.entries[self.order[[shard.last - 1 for shard in self.shards[:-1]]]]
        bounds = [0, *(last["offset"] + last["length"]).tolist(), archive.size]
        return tuple(Region(start, stop) for start, stop in pairwise(bounds))

    def entries_of(self, shard: Unit) -> Entries:
        return self.listing.entries[self.order[shard.first : shard.last]]


def make_plan(listing: Listing, options: PlanOptions, *, version: tuple[int, int] = FORMAT_VERSION) -> Plan:
    """Plan a conversion, with the same result on every platform and for any order of the entries.

    An earlier format ``version`` plans the repair of an earlier dataset. Takes 16 bytes per entry in addition
    to the listing. Raises UsageError for an empty listing.
    """
    entries = listing.entries
    if not len(entries):
        advice = "; the val fraction selects none of so few" if "val_fraction" in listing.options else ""
        raise UsageError(f"the source has no images of the split {listing.split}{advice}")
    order = _order(entries, options)
    key_bytes = int(np.char.str_len(entries["key"]).max())
    suffix, growth = SUFFIXES[options.container], MAX_GROWTH if options.transcodes else 1
    lengths = entries["length"][order]
    shards = tuple(
        Unit(
            name=f"shard-{number:05d}{suffix}",
            number=number,
            first=first,
            last=last,
            size=math.ceil(int(lengths[first:last].sum()) * growth),
            key_bytes=key_bytes,
        )
        for number, (first, last) in enumerate(shard_ranges(lengths, options.shard_size))
    )
    return Plan(
        listing=listing,
        options=options,
        order=order,
        shards=shards,
        key_bytes=key_bytes,
        class_sorted=is_class_sorted(entries["label"][order]),
        digests={
            policy: _digest(listing, replace(options, on_bad_image=policy), order, shards, version)
            for policy in BAD_IMAGE_POLICIES
        },
    )


def _order(entries: Entries, options: PlanOptions) -> npt.NDArray[np.uint32]:
    if options.order in ITEM_ORDERS:
        numbers = np.arange(len(entries), dtype=np.uint32)
        return numbers if options.order == GIVEN else numbers[permutation(len(entries), options.seed)]
    columns = {ARCHIVE_ORDER: ("offset",), "source": ("offset", "path")}.get(options.order, ("key",))
    in_order = np.lexsort([entries[column] for column in columns]).astype(np.uint32)
    return in_order[permutation(len(entries), options.seed)] if options.order == "shuffled" else in_order


def shard_ranges(lengths: npt.NDArray[np.int64], shard_size: int) -> Iterator[tuple[int, int]]:
    """Return each shard's range of records [first, last), given the records' lengths in bytes.

    A shard has at least one record, and is filled until the next record would exceed ``shard_size``.
    """
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, before + shard_size, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return pairwise(bounds)


def _digest(
    listing: Listing,
    options: PlanOptions,
    order: npt.NDArray[np.uint32],
    shards: tuple[Unit, ...],
    version: tuple[int, int],
) -> str:
    key_bytes = shards[0].key_bytes
    head = {
        "version": version,
        "options": options.to_json(),
        "split": listing.split,
        "labels": listing.labels.digest,
        "key_bytes": key_bytes,
        "bounds": [s.last for s in shards],
    }
    if len(listing.schema) or not listing.has_images:
        head["columns"] = [field.to_json() for field in listing.schema]
        head["has_images"] = listing.has_images
    digest = hashlib.sha256(canonical_json(head))
    for column, kind in (("key", f"S{key_bytes}"), ("label", "<i4"), ("length", "<i8")):
        for rows in blocks(order):
            digest.update(listing.entries[column][rows].astype(kind).tobytes())
    return "sha256:" + digest.hexdigest()


def blocks(order: npt.NDArray[np.uint32]) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield an order in blocks whose entries take little memory."""
    return (order[start : start + (1 << 16)] for start in range(0, len(order), 1 << 16))


def deal_shards(plans: Iterable[Plan], part: tuple[int, int]) -> Iterator[tuple[Unit, ...]]:
    """Yield the shards of each plan in part i of n, (i, n); they are dealt one by one over all plans."""
    (number, of), before = part, 0
    for plan in plans:
        yield tuple(s for s in plan.shards if (before + s.number) % of == number - 1)
        before += len(plan.shards)


def writer_versions(options: PlanOptions) -> dict[str, str]:
    """Return this machine's versions and settings that affect the bytes of shards with these options."""
    versions = {"shardprep": version("shardprep")}
    versions |= {name: str(value) for name, value in container(options.container).library().items()}
    return versions | ({"transcoder": options.transcoder} if options.transcodes else {})


def check_machine(
    home_versions: Mapping[str, str], options: PlanOptions, run: Path, reader: ByteReader, entries: Entries
) -> None:
    """Raise OtherMachine unless this machine builds the same bytes as the one that planned the shard.

    ``home_versions`` has that machine's versions; ``run`` is a folder that it made. Reads the first entry.
    """
    refuse_other_versions(home_versions, writer_versions(options), "conversion")
    if not run.is_dir():
        raise other_machine_error(
            "does not see the output, or its run has ended; mount the output there at the same path", run
        )
    try:
        with reader.open() as opened, suppress(BadImage, BadValue):
            opened.read(entries[0])
    except (SourceDamaged, OSError) as error:
        raise other_machine_error(
            f"does not see the source as it was listed ({error}); mount the same source there at the same "
            "path"
        ) from error
