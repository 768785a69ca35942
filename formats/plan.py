"""Which image goes to which shard, in which order: a pure function of listing and options."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .canonical import canonical_json
from .errors import UsageError
from .shard import CONTAINERS, SUFFIXES
from .source import Entries, Listing

FORMAT_VERSION = (1, 0)
ORDERS = ("shuffled", "key")
BAD_IMAGE_POLICIES = ("fail", "skip")
DEFAULT_SHARD_SIZE = 256 << 20


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose that decides the bytes of the output.

    ``shard_size`` is in image bytes. With ``decode_check`` an image that does not decode is a bad one, too.
    """

    container: str = "lmdb"
    shard_size: int = DEFAULT_SHARD_SIZE
    order: str = "shuffled"
    seed: int = 0
    on_bad_image: str = "fail"
    decode_check: bool = False

    def __post_init__(self) -> None:
        choices = {"container": CONTAINERS, "order": ORDERS, "on_bad_image": BAD_IMAGE_POLICIES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if not 0 < self.shard_size <= 4 << 30:
            raise UsageError(f"the shard size must be between 1 byte and 4 GiB, not {self.shard_size}")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"the seed must be between 0 and 2**64 - 1, not {self.seed}")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much goes into one shard; sizes of files and maps follow from it alone."""

    records: int
    payload_bytes: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to be: its name, and its records as positions ``first`` … ``last`` of the order."""

    name: str
    number: int
    first: int
    last: int
    extent: Extent


@dataclass(frozen=True)
class Plan:
    """The whole conversion: ``entries[order[i]]`` is the record at position *i* of the output."""

    options: PlanOptions
    split: str
    entries: Entries
    order: npt.NDArray[np.uint32]
    shards: tuple[PlannedShard, ...]
    key_bytes: int
    class_sorted: bool
    digest: str

    def entries_of(self, shard: PlannedShard) -> Entries:
        """A shard's entries in stored order."""
        return self.entries[self.order[shard.first : shard.last]]

    def describe(self) -> dict[str, Any]:
        """What the manifest keeps of the plan."""
        return asdict(self.options) | {"sha256": self.digest}


def plan(listing: Listing, options: PlanOptions) -> Plan:
    """Deterministic on every platform; the same entries in any order give the same plan.

    Costs 16 bytes per entry beyond the listing. Raises UsageError for an empty listing.
    """
    entries = listing.entries
    if not len(entries):
        raise UsageError(f"the source has no images of the split {listing.split}")
    order = _order(entries, options)
    key_bytes = int(np.char.str_len(entries["key"]).max())
    shards = _shards(entries["length"][order], options, key_bytes)
    labels = entries["label"][order]
    return Plan(
        options=options,
        split=listing.split,
        entries=entries,
        order=order,
        shards=shards,
        key_bytes=key_bytes,
        class_sorted=is_class_sorted(labels),
        digest=_digest(listing, options, order, shards),
    )


def _order(entries: Entries, options: PlanOptions) -> npt.NDArray[np.uint32]:
    by_key = np.argsort(entries["key"], kind="stable").astype(np.uint32)
    if options.order == "key":
        return by_key
    return by_key[permutation(len(entries), options.seed)]


def permutation(count: int, seed: int) -> npt.NDArray[np.intp]:
    """A uniform permutation of ``range(count)``: the sorting order of Philox's raw 64-bit stream.

    Philox (Salmon et al. 2011) because numpy promises its raw stream for good, while the
    algorithm of ``Generator.permutation`` may change.
    """
    stream = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(stream, kind="stable")


def is_class_sorted(labels: npt.NDArray[np.int32]) -> bool:
    """Whether each class lies in one run, which trains badly when read in stored order."""
    runs = 1 + int(np.count_nonzero(np.diff(labels)))
    classes = len(np.unique(labels))
    return classes > 1 and runs == classes


def _shards(lengths: npt.NDArray[np.int64], options: PlanOptions, key_bytes: int) -> tuple[PlannedShard, ...]:
    """Fill each shard until the next image would pass ``shard_size``; one image at the least."""
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, before + options.shard_size, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    suffix = SUFFIXES[options.container]
    return tuple(
        PlannedShard(
            name=f"shard-{number:05d}{suffix}",
            number=number,
            first=first,
            last=last,
            extent=Extent(last - first, int(lengths[first:last].sum()), key_bytes),
        )
        for number, (first, last) in enumerate(pairwise(bounds))
    )


def _digest(
    listing: Listing,
    options: PlanOptions,
    order: npt.NDArray[np.uint32],
    shards: tuple[PlannedShard, ...],
) -> str:
    """SHA-256 over everything that decides the output, but the images' bytes themselves."""
    head = {
        "version": FORMAT_VERSION,
        "options": asdict(options),
        "split": listing.split,
        "labels": listing.labels.digest,
        "key_bytes": shards[0].extent.key_bytes,
        "bounds": [s.last for s in shards],
    }
    digest = hashlib.sha256(canonical_json(head))
    columns = {"key": f"S{shards[0].extent.key_bytes}", "label": "<i4", "length": "<i8"}
    for column, kind in columns.items():
        for start in range(0, len(order), 1 << 16):
            rows = order[start : start + (1 << 16)]
            digest.update(listing.entries[column][rows].astype(kind).tobytes())
    return "sha256:" + digest.hexdigest()
