"""The checks of one file of a dataset: every record of a shard, every value of a column, and the claims.

They run in a process of their own, since a damaged file may crash a library.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, CorruptRecord, ManifestDamaged, OperationError, ShardDamaged
from shardprep.formats.images.crop_ready import marked
from shardprep.formats.images.decode import check_decodes
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.info import NO_IMAGE, ImageFlag
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.labels import OFFICIAL_IMAGES, UNLABELLED
from shardprep.formats.records.record import (
    MAX_SEED,
    ORDERS,
    content_digest,
    is_class_sorted,
    permutation,
    record_crc,
)
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.files import OPEN_FLAGS, hash_descriptor
from shardprep.formats.runtime.json_record import has_exactly, parse_canonical_json
from shardprep.formats.shards.columns import column_row
from shardprep.formats.shards.container import StoredRecord
from shardprep.formats.shards.files import Rows, ShardFile, read_small, table_header
from shardprep.formats.shards.in_place import ARCHIVE_NAME, Region, changed_in, hash_region
from shardprep.formats.shards.manifest import QUARANTINE_NAME, Manifest
from shardprep.formats.shards.read import IN_PLACE, container
from shardprep.formats.shards.tables import index_row, kinds_in

NO_MEMORY = "there is not enough memory; use fewer workers"


@dataclass
class CheckResult:
    """The findings: ``problems`` as (key or None, message), ``notes`` of the decoder, and content digests.

    ``unread`` are the system's errors at which the check ended. ``changed`` says that the region of the
    archive is not what was indexed; empty if it is.
    """

    problems: list[tuple[str | None, str]] = field(default_factory=list)
    notes: list[tuple[str | None, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    digests: bytes = b""
    changed: str = ""

    @property
    def found_nothing(self) -> bool:
        """Whether all was read, and nothing is wrong or remarkable."""
        return not (self.problems or self.notes or self.unread or self.changed)

    def add(self, other: CheckResult) -> None:
        """Add the findings of another check of the same file."""
        self.problems += other.problems
        self.notes += other.notes
        self.unread += other.unread


Value = tuple[bytes, int, bytes]
"""A record's key, its label, and its image or encoded value."""


@dataclass(frozen=True, eq=False)
class Check(ABC):
    """What to check of a file at ``path``, of so many ``records`` and this ``sha256``. Picklable.

    A damaged container may crash the library that opens it, and a damaged image the decoder: the methods are
    called in separate processes. With ``decode`` the values are decoded, too.
    """

    path: Path
    records: int
    sha256: str
    decode: bool

    def found(self) -> CheckResult:
        """Hash the file, and check what is in the same file, whatever its name becomes."""
        found, digests = CheckResult(), []
        with hashed_file(self, found) as path:
            found.changed = self._changed_beside()
            for key, label, value in self._readable(path, found, range(self.records)):
                digests.append(content_digest(key, label, value))
                if self.decode:
                    self._decode(key, value, found)
        found.digests = b"".join(digests)
        return found

    def decoded(self, ordinals: range) -> CheckResult:
        """Decode the readable records at these ordinals, and check nothing else."""
        found = CheckResult()
        with suppress(ShardDamaged):
            for key, _, value in self._readable(self.path, CheckResult(), ordinals):
                self._decode(key, value, found)
        return found

    @abstractmethod
    def key_of(self, ordinal: int) -> str:
        """Return the key of a record. Raises ShardDamaged."""

    @abstractmethod
    def _readable(self, path: Path, found: CheckResult, ordinals: range) -> Iterator[Value]:
        """Yield the values at these ordinals that match their checksums; findings are added to ``found``."""

    def _changed_beside(self) -> str:
        """Say what changed in another file that this one refers to; empty if nothing."""
        return ""

    def _decode(self, key: bytes, value: bytes, found: CheckResult) -> None:
        check_decoding(key, value, found)


@contextmanager
def hashed_file(check: Check, found: CheckResult) -> Iterator[Path]:
    """Hash the file, and yield a path to the same file, whatever its name becomes.

    An error in the context ends it, and is added to ``found``; earlier findings stay.
    """
    descriptor = os.open(check.path, OPEN_FLAGS | os.O_NOFOLLOW)
    try:
        if hash_descriptor(descriptor) != check.sha256:
            found.problems.append((None, "its SHA-256 differs from the manifest"))
        same = Path(f"/proc/self/fd/{descriptor}")
        yield same if same.exists() else check.path
    except ShardDamaged as error:
        found.problems.append((None, error.message))
    except OperationError as error:
        found.unread.append(error.message)
    except OSError as error:
        found.unread.append(error.strerror or str(error))
    except MemoryError:
        found.unread.append(NO_MEMORY)
    finally:
        os.close(descriptor)


def check_decoding(key: bytes, image: bytes, found: CheckResult) -> None:
    """Decode a record's image. A crash of the decoder ends the process."""
    with tempfile.TemporaryFile() as said:
        try:
            with stderr_in(said):
                check_decodes(image)
        except BadImage as error:
            found.problems.append((_text(key), error.message))
            return
        said.seek(0)
        first = _text(said.read(4096)).split("\n")[0].strip()
    if first:
        found.notes.append((_text(key), f"the decoder says: {first}"))


@contextmanager
def stderr_in(file: IO[bytes]) -> Iterator[None]:
    """Redirect to a file all that a C library writes to descriptor 2, in a process that does nothing else."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _text(key: bytes) -> str:
    """Return a key as text, whatever its bytes are."""
    return key.decode("utf-8", "replace")


ROWS_BYTES = 1 << 20  # of a table, read at a time


@dataclass(frozen=True, eq=False)
class ContainerCheck(Check):
    """What to check of a container; ``rows`` are its rows of the table, None if that is damaged."""

    container: str
    rows: Rows | None

    @abstractmethod
    def _key(self, ordinal: int) -> bytes | None:
        """Return the key that the index has for a record, None if that is damaged."""

    @abstractmethod
    def _difference(self, stored: StoredRecord, ordinal: int) -> str:
        """Say in what a record differs from its row; empty if it does not."""

    def key_of(self, ordinal: int) -> str:
        with container(self.container).read(self.path) as reader:
            return _text(reader.address(ordinal)[0])

    def _readable(self, path: Path, found: CheckResult, ordinals: range) -> Iterator[Value]:
        named = self.path if self.container == IN_PLACE else path  # in place is found by the shard's name
        with container(self.container).read(named) as reader:
            if len(reader) != self.records:
                found.problems.append((None, f"has {len(reader)} records, not {self.records}"))
            for ordinal in ordinals:
                wanted = self._key(ordinal)
                if wanted is None and ordinal >= len(reader):
                    return  # no record that is missing can be named
                key = None if wanted is None else _text(wanted)
                try:
                    stored = reader.checked(ordinal)
                except (CorruptRecord, ShardDamaged) as error:
                    found.problems.append((key or error.key, error.message))
                    continue
                if difference := self._difference(stored, ordinal):
                    found.problems.append((key, difference))
                yield stored.key, stored.label, stored.image


@dataclass(frozen=True, eq=False)
class ShardCheck(ContainerCheck):
    """What to check of the shard of that ``number``, with rows of the index.

    ``region`` is where the images are in the archive, None where the shard has them.
    """

    number: int
    has_images: bool = True
    region: Region | None = None

    def _changed_beside(self) -> str:
        archive = self.path.with_name(ARCHIVE_NAME)
        is_changed = self.region and hash_region(archive, self.region) != self.region.sha256
        return changed_in(archive, self.region) if self.region and is_changed else ""

    def _decode(self, key: bytes, value: bytes, found: CheckResult) -> None:
        if self.has_images:
            check_decoding(key, value, found)

    def _key(self, ordinal: int) -> bytes | None:
        return None if self.rows is None else self.rows[ordinal]["key"]

    def _difference(self, stored: StoredRecord, ordinal: int) -> str:
        if self.rows is None:
            return ""
        row, image = self.rows[ordinal], stored.image
        try:
            info = marked(image, read_image_header(image)) if self.has_images else NO_IMAGE
            expected = index_row(
                stored if row["offset"] else stored._replace(offset=0), info, self.number, ordinal
            )
        except BadImage as error:
            return error.message
        if row["flags"] & ~info.flags & ImageFlag.CROP_READY:
            return f"record {ordinal} has a table of segments that is not that of its bytes"
        if row.item() != expected:
            return f"record {ordinal} differs from the index: its key is {_text(stored.key)}"
        return ""


@dataclass(frozen=True, eq=False)
class ColumnCheck(Check):
    """What to check of a file of the column ``field``; ``keys`` are its records', None if unknown."""

    field: Field
    keys: npt.NDArray[np.bytes_] | None

    def _key(self, ordinal: int) -> bytes | None:
        return None if self.keys is None else self.keys[ordinal]

    def _decode(self, key: bytes, value: bytes, found: CheckResult) -> None:
        if self.field.kind == "image":
            check_decoding(key, value, found)
            return
        try:
            self.field.codec.decode(value)
        except BadValue as error:
            found.problems.append((_text(key), error.message))


@dataclass(frozen=True, eq=False)
class ColumnShardCheck(ColumnCheck, ContainerCheck):
    """What to check of a column's shard, with rows of its table."""

    def _difference(self, stored: StoredRecord, ordinal: int) -> str:
        place = stored.offset, len(stored.image), stored.crc32c
        row = place if self.rows is None else self.rows[ordinal].item()
        is_same = self._key(ordinal) in (None, stored.key) and stored.label == UNLABELLED
        if is_same and row in (place, place[1:]):  # format 1.0 has no offsets
            return ""
        return f"value {ordinal} differs from the table: its key is {_text(stored.key)}"


@dataclass(frozen=True, eq=False)
class ColumnTableCheck(ColumnCheck):
    """What to check of a column's table of values of one size; without keys no checksum can be."""

    def key_of(self, ordinal: int) -> str:
        return _text(self._key(ordinal) or b"")

    def _readable(self, path: Path, found: CheckResult, ordinals: range) -> Iterator[Value]:
        if self.keys is None:
            return
        for ordinal, row in zip(ordinals, self._rows(path, ordinals), strict=False):
            key, value = self.keys[ordinal], row[:-4]
            if record_crc(key, UNLABELLED, value) == int.from_bytes(row[-4:], "little"):
                yield key, UNLABELLED, value
            else:
                found.problems.append((_text(key), f"row {ordinal} does not match its CRC-32C"))

    def _rows(self, path: Path, ordinals: range) -> Iterator[bytes]:
        """Yield the bytes of each row. Raises ShardDamaged if the file ends before the last."""
        row = column_row(self.field)  # of values of one size, which every version has alike
        start, size = len(table_header(row, self.records)), row.itemsize
        file, left = ShardFile(path), iter(ordinals)
        try:
            while some := list(islice(left, max(1, ROWS_BYTES // size))):
                data = file.read_at(len(some) * size, start + some[0] * size)
                if len(data) < len(some) * size:
                    raise ShardDamaged("ends before its last row", path=self.path)
                yield from (data[at : at + size] for at in range(0, len(data), size))
        finally:
            file.close()


MAX_QUARANTINE_BYTES = 64 << 20


def false_claims(manifest: Manifest, index: Rows) -> Iterator[str]:
    """Yield the claims of the manifest that the index contradicts.

    That is of unique keys, the plan's order, ``kinds``, ``crop_ready``, ``class_sorted`` and ``partial``. If
    images were skipped, the plan's order and ``class_sorted`` cannot be checked. ``partial`` is checked for
    the official classes only.
    """
    if not _order_ok(manifest, index):
        yield f"its order differs from the plan's ({manifest.plan['order']}, seed {manifest.plan['seed']})"
    keys = np.sort(index["key"])
    if (keys[:-1] == keys[1:]).any():
        yield "two records have the same key"
    if (kinds := kinds_in(index["flags"])) != manifest.kinds:
        yield (
            f"its kinds are {', '.join(manifest.kinds) or 'none'}, but the records have "
            f"{', '.join(kinds) or 'none'}"
        )
    if (ready := int(np.count_nonzero(index["flags"] & ImageFlag.CROP_READY))) != manifest.crop_ready:
        yield f"{manifest.crop_ready} of its images are crop-ready, but {ready} of the records are"
    is_sorted = is_class_sorted(index["label"])
    if is_sorted != manifest.class_sorted and not manifest.skipped:
        yield f"its class_sorted is {manifest.class_sorted}, and the records' order is {is_sorted}"
    wanted = OFFICIAL_IMAGES.get(manifest.split) if manifest.labels.is_official else None
    is_partial = manifest.records + manifest.skipped != wanted
    if wanted is not None and is_partial != manifest.partial:
        yield f"its partial is {manifest.partial}, with {manifest.records + manifest.skipped} images of {wanted}"


def check_quarantine(dataset: Path, manifest: Manifest) -> None:
    """Check the number of skipped images against the quarantine list. Raises ManifestDamaged, OSError."""
    entry, path = manifest.table(QUARANTINE_NAME), dataset / QUARANTINE_NAME
    listed = len(quarantined(dataset)) if entry else 0
    if not manifest.skipped == listed == (entry.records if entry else 0):
        raise ManifestDamaged(f"lists {listed} images, but {manifest.skipped} were skipped", path=path)


def quarantined(dataset: Path) -> list[dict[str, str]]:
    """Return the quarantine list: key, where and reason of each image. Raises ManifestDamaged, OSError."""
    path = dataset / QUARANTINE_NAME
    try:
        listed = parse_canonical_json(read_small(path, MAX_QUARANTINE_BYTES))
    except ValueError as error:
        raise ManifestDamaged(str(error), path=path) from error
    kinds: dict[str, type] = {"key": str, "where": str, "reason": str}
    if not isinstance(listed, list) or not all(has_exactly(each, kinds) for each in listed):
        raise ManifestDamaged("is not a list of images with key, where and reason", path=path)
    return listed


def _order_ok(manifest: Manifest, index: Rows) -> bool:
    order, seed, keys = manifest.plan["order"], manifest.plan["seed"], index["key"]
    if manifest.skipped or order not in ORDERS:  # a later release may have more orders
        return True
    if order == "shuffled":
        if not 0 <= seed <= MAX_SEED:
            return False
        by_key = np.empty_like(keys)
        by_key[permutation(len(keys), seed)] = keys
        keys = by_key
    return bool((keys[:-1] <= keys[1:]).all())
