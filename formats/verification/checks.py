"""Checks of a dataset's files, records and column values, and of the manifest's claims; and their findings.

A file is checked in a separate process, since a damaged one may crash a library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import (
    BadImage,
    CorruptRecord,
    DataError,
    ManifestDamaged,
    OperationError,
    ShardDamaged,
    printable,
)
from shardprep.formats.images.crop_ready import flag_crop_ready
from shardprep.formats.images.decode import check_decodes, crash_reason
from shardprep.formats.images.header import NO_IMAGE, ImageFlag, read_image_header
from shardprep.formats.records.record import (
    MAX_SEED,
    OFFICIAL_IMAGES,
    UNLABELLED,
    content_digest,
    is_class_sorted,
    permutation,
    record_crc,
)
from shardprep.formats.records.schema import BadValue, Field
from shardprep.formats.runtime.files import OPEN_FLAGS, hash_descriptor, memory_file, read_small_file
from shardprep.formats.runtime.json_record import matches, parse_canonical_json
from shardprep.formats.runtime.processes import ChildDied, WorkerPool
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.columns import column_row
from shardprep.formats.shards.manifest import QUARANTINE_NAME, Manifest, index_row, kinds_in
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    IN_PLACE,
    FileEntry,
    Region,
    Rows,
    Shard,
    ShardFile,
    StoredRecord,
    changed_in,
    hash_region,
    open_published,
    table_header,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a verification found.

    ``file`` is the file's name in the dataset, ``problem`` describes what is wrong, and ``key`` is the key of
    the record concerned, or None. The attributes may hold any text from a file; ``str`` is printable.
    """

    file: str
    problem: str
    key: str | None = None

    def __str__(self) -> str:
        return ": ".join(printable(part) for part in (self.file, self.key, self.problem) if part)


@dataclass
class CheckResult:
    """The result of checking one file, as in a :class:`Report`, and the content digests of its records."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    digests: bytes = b""

    def add_to(self, other: Report | CheckResult) -> None:
        other.findings += self.findings
        other.unchecked += self.unchecked
        other.notes += self.notes


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        dataset: The folder; for a dataset at a URL, the one in the cache.
        level: The level checked.
        manifest: The manifest, None if it is damaged.
        findings: Damage.
        unchecked: Files that could not be read.
        notes: Remarks that are not damage, such as messages of the decoder.
        rebuilt: Names of the files that a repair replaced before this verification.
        url: The URL of a dataset read through a cache, or None.
    """

    dataset: Path
    level: str
    manifest: Manifest | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    rebuilt: tuple[str, ...] = ()
    url: str | None = None

    @property
    def location(self) -> str:
        """The dataset's URL, or the path of its folder."""
        return self.url or os.fspath(self.dataset)

    def __repr__(self) -> str:
        findings, notes = count_of(len(self.findings), "finding"), count_of(len(self.notes), "note")
        counts = f"{findings}, {len(self.unchecked):,} unchecked, {notes}"
        return f"<Report on {self.location!r} ({self.level}): {counts}>"

    @property
    def exit_code(self) -> int:
        """The exit code: 0 for intact, 1 for damaged or incomplete, 3 if not everything could be checked."""
        return 1 if self.findings else 3 if self.unchecked else 0

    def raise_for_findings(self) -> None:
        """Raise DataError or OperationError unless the dataset is intact."""
        if self.findings:
            more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
            files = {file.name for file in self.manifest.files} if self.manifest else set()
            mends = "; prep repair rebuilds it" if self.findings[0].file in files else ""
            raise DataError(f"{self.findings[0]}{more}{mends}", path=self.location)
        if self.unchecked:
            raise OperationError(f"could not check {self.unchecked[0]}", path=self.location)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        lists = {"findings": self.findings, "unchecked": self.unchecked, "notes": self.notes}
        return {
            "dataset": self.location,
            "level": self.level,
            "ok": self.exit_code == 0,
            **{name: getattr(self.manifest, name, None) for name in ("root", "content_root", "records")},
            **{
                name: [{"file": f.file, "key": f.key, "problem": f.problem} for f in found]
                for name, found in lists.items()
            },
        }


@contextmanager
def report_errors(name: str, report: Report | CheckResult) -> Iterator[None]:
    """Report damage of a file as a finding, and a system error as unchecked."""
    try:
        yield
    except DataError as error:
        report.findings.append(Finding(name, error.message))
    except OperationError as error:
        report.unchecked.append(Finding(name, error.message))
    except OSError as error:
        report.unchecked.append(Finding(name, error.strerror or str(error)))
    except MemoryError:
        report.unchecked.append(Finding(name, "there is not enough memory; use fewer workers"))


ROWS_BYTES = 1 << 20  # of a table, per read

Value = tuple[bytes, int, bytes]
"""A record's key, its label, and its image or encoded value."""


@dataclass(frozen=True, eq=False)
class FileCheck:
    """A check of the file ``entry`` at ``path``, with its records or column values, at a level. Picklable.

    If it ``reads_values``, its methods run in separate processes: a damaged container may crash the library
    that opens it, and a damaged image the decoder. ``container`` is empty for any other file, such as a
    column's table of values of one size. ``keys`` are the records' keys, and ``rows`` their rows of the index
    or the column's table; None if these are damaged. ``number`` is the shard's, and ``field`` its column,
    None for records. ``region`` is the part of the archive that holds the images, None if the shard does.
    The number of values decoded so far is written to ``place`` in the int64 array in the file ``counts``.
    """

    path: Path
    entry: FileEntry
    level: str
    container: str = ""
    keys: npt.NDArray[np.bytes_] | None = None
    rows: Rows | None = None
    number: int = 0
    field: Field | None = None
    has_images: bool = True
    region: Region | None = None
    counts: Path | None = None
    place: int = 0

    @property
    def reads_values(self) -> bool:
        """Whether records or values are read, not only hashed."""
        return self.level in ("records", "decode") and (self.container != "" or self.field is not None)

    def run(self) -> CheckResult:
        """Hash the file, and check the content of the same file, even if it is renamed."""
        result, digests = CheckResult(), []
        flags = OPEN_FLAGS | os.O_NOFOLLOW
        counts = np.zeros(1, np.int64) if self.counts is None else np.memmap(self.counts, np.int64, "r+")
        with open_published(self.path, flags) as descriptor, report_errors(self.entry.name, result):
            if hash_descriptor(descriptor) != self.entry.sha256:
                self._add(result, None, "its SHA-256 differs from the manifest")
            if self.region:
                archive = self.path.with_name(ARCHIVE_NAME)
                if hash_region(archive, self.region) != self.region.sha256:
                    result.findings.append(Finding(ARCHIVE_NAME, changed_in(archive, self.region)))
            path = Path(f"/proc/self/fd/{descriptor}")
            values = self._values(path, result, range(self.entry.records)) if self.reads_values else ()
            for key, label, value in values:
                digests.append(content_digest(key, label, value))
                if self.level == "decode":
                    self._decode(key, value, result)
                    counts[self.place] = len(digests)
        result.digests = b"".join(digests)
        return result

    def decode(self, ordinals: range) -> CheckResult:
        """Only decode the readable records at these ordinals."""
        result = CheckResult()
        with suppress(ShardDamaged):
            for key, _, value in self._values(self.path, result, ordinals):
                self._decode(key, value, result)
        return result

    def key_of(self, ordinal: int) -> str:
        """Return the key of a record. Raises ShardDamaged."""
        if not self.container:
            return text_of(self._key(ordinal) or b"")
        with Shard(self.path, self.container) as reader:
            return text_of(reader.address(ordinal)[0])

    def _add(self, result: CheckResult, key: str | None, problem: str) -> None:
        result.findings.append(Finding(self.entry.name, problem, key))

    def _key(self, ordinal: int) -> bytes | None:
        return None if self.keys is None else self.keys[ordinal]

    def _values(self, path: Path, result: CheckResult, ordinals: range) -> Iterator[Value]:
        """Yield the values at these ordinals that match their checksums; add findings to ``result``."""
        return (self._shard_values if self.container else self._table_values)(path, result, ordinals)

    def _shard_values(self, path: Path, result: CheckResult, ordinals: range) -> Iterator[Value]:
        named = self.path if self.container == IN_PLACE else path  # found by the shard's name
        with Shard(named, self.container) as reader:
            if reader.records != self.entry.records:
                self._add(result, None, f"has {reader.records:,} records, not {self.entry.records:,}")
            for ordinal in ordinals:
                wanted = self._key(ordinal)
                if wanted is None and ordinal >= reader.records:
                    return  # the keys of missing records are unknown
                key = None if wanted is None else text_of(wanted)
                try:
                    stored = reader.read_record(ordinal)
                except (CorruptRecord, ShardDamaged) as error:
                    self._add(result, key or error.key, error.message)
                    continue
                if difference := self._difference(stored, ordinal):
                    self._add(result, key, difference)
                    if self.field is not None:  # the value may belong to a column of another kind
                        continue
                yield stored.key, stored.label, stored.image

    def _difference(self, stored: StoredRecord, ordinal: int) -> str:
        """Describe how a record differs from its row; empty if it does not."""
        key = text_of(stored.key)
        if self.field is not None:
            place = stored.offset, len(stored.image), stored.crc32c
            row = place if self.rows is None else self.rows[ordinal].item()
            is_same = self._key(ordinal) in (None, stored.key) and stored.label == UNLABELLED
            if is_same and row in (place, place[1:]):  # format 1.0 has no offsets
                return ""
            return f"value {ordinal} differs from the table: its key is {key}"
        if self.rows is None:
            return ""
        row, image = self.rows[ordinal], stored.image
        try:
            info = flag_crop_ready(image, read_image_header(image)) if self.has_images else NO_IMAGE
            own = stored if row["offset"] else stored._replace(offset=0)
            expected = index_row(own, info, self.number, ordinal)
        except BadImage as error:
            return error.message
        if row["flags"] & ~info.flags & ImageFlag.CROP_READY:
            return f"record {ordinal} has a table of segments that does not match its bytes"
        return "" if row.item() == expected else f"record {ordinal} differs from the index: its key is {key}"

    def _table_values(self, path: Path, result: CheckResult, ordinals: range) -> Iterator[Value]:
        """Yield the values of a column's table. Without keys, checksums cannot be checked."""
        if self.keys is None or self.field is None:
            return
        row = column_row(self.field)  # the same in all versions, for values of one size
        start, size = len(table_header(row, self.entry.records)), row.itemsize
        at_once = max(1, ROWS_BYTES // size)
        with closing(ShardFile(path)) as file:
            for first in range(ordinals.start, ordinals.stop, at_once):
                block = range(first, min(first + at_once, ordinals.stop))
                data = file.read_at(len(block) * size, start + first * size)
                if len(data) < len(block) * size:
                    raise ShardDamaged("ends before its last row", path=self.path)
                for place, ordinal in enumerate(block):
                    key, stored = self.keys[ordinal], data[place * size : (place + 1) * size]
                    value, crc32c = stored[:-4], int.from_bytes(stored[-4:], "little")
                    if record_crc(key, UNLABELLED, value) == crc32c:
                        yield key, UNLABELLED, value
                    else:
                        self._add(result, text_of(key), f"row {ordinal} does not match its CRC-32C")

    def _decode(self, key: bytes, value: bytes, result: CheckResult) -> None:
        """Decode a record's image or value. A crash of the decoder kills the process."""
        try:
            if self.field is not None and self.field.kind != "image":
                self.field.codec.decode(value)
            elif self.field is not None or self.has_images:
                with os.fdopen(memory_file(), "r+b") as output:
                    with redirect_stderr(output):
                        check_decodes(value)
                    output.seek(0)
                    if first := text_of(output.read(4096)).split("\n")[0].strip():
                        note = f"the decoder says: {first}"
                        result.notes.append(Finding(self.entry.name, note, text_of(key)))
        except (BadImage, BadValue) as error:
            self._add(result, text_of(key), error.message)


def run_in_child(check: FileCheck, timeout_s: float, children: WorkerPool) -> CheckResult:
    """Run a check in one of the ``children``, and find the images that crash the decoder.

    A process is reused only if it found nothing: a damaged file may corrupt a library's state.
    """

    def is_clean(result: CheckResult) -> bool:
        return not (result.findings or result.unchecked or result.notes)

    def call(method: Callable[..., CheckResult], *arguments: range) -> CheckResult:
        return children.call_within(timeout_s, is_clean, method, *arguments)

    def decode(ordinals: range) -> CheckResult:
        """Decode these images in one process; if it crashes, decode each half in another one."""
        try:
            return call(check.decode, ordinals)
        except ChildDied as error:
            if len(ordinals) == 1:
                key = children.call_within(timeout_s, lambda key: False, check.key_of, ordinals[0])
                return CheckResult([Finding(check.entry.name, crash_reason(error.signal), key)])
        half = len(ordinals) // 2
        result = decode(ordinals[:half])
        decode(ordinals[half:]).add_to(result)
        return result

    with suppress(ChildDied):
        return call(check.run)
    # without its row, no image is looked at, and a crash is the container's
    result = call(replace(check, level="records", rows=None if check.field is None else check.rows).run)
    crashes = decode(range(check.entry.records))
    if not crashes.findings:
        problem = "the decoder crashed on its images together, but on none of them alone"
        crashes.notes.append(Finding(check.entry.name, problem))
    crashes.add_to(result)
    result.findings = [*dict.fromkeys(result.findings)]
    return result


@contextmanager
def redirect_stderr(file: IO[bytes]) -> Iterator[None]:
    """Redirect descriptor 2, to which C libraries write, to a file; for a process that does nothing else."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def text_of(key: bytes) -> str:
    return key.decode("utf-8", "replace")


MAX_QUARANTINE_BYTES = 64 << 20


def false_claims(manifest: Manifest, index: Rows) -> Iterator[str]:
    """Yield the claims of the manifest that the index contradicts.

    These are unique keys, the plan's order, ``kinds``, ``crop_ready``, ``class_sorted`` and ``partial``; the
    order and ``class_sorted`` only if no image was skipped, ``partial`` only for the official classes.
    """
    if not _has_plan_order(manifest, index):
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
        yield f"{manifest.crop_ready:,} of its images are crop-ready, but {ready:,} of the records are"
    is_sorted = is_class_sorted(index["label"])
    if is_sorted != manifest.class_sorted and not manifest.skipped:
        yield f"its class_sorted is {manifest.class_sorted}, but for the records it is {is_sorted}"
    wanted = OFFICIAL_IMAGES.get(manifest.split) if manifest.labels.is_official else None
    is_partial = manifest.records + manifest.skipped != wanted
    if wanted is not None and is_partial != manifest.partial:
        yield f"its partial is {manifest.partial}, with {manifest.records + manifest.skipped:,} images of {wanted:,}"


def check_quarantine(dataset: Path, manifest: Manifest) -> None:
    """Check the number of skipped images against the quarantine list. Raises ManifestDamaged, OSError."""
    entry, path = manifest.table(QUARANTINE_NAME), dataset / QUARANTINE_NAME
    listed = len(read_quarantine(dataset)) if entry else 0
    if not manifest.skipped == listed == (entry.records if entry else 0):
        raise ManifestDamaged(f"lists {listed:,} images, but {manifest.skipped:,} were skipped", path=path)


def read_quarantine(dataset: Path) -> list[dict[str, str]]:
    """Return the key, where and reason of each quarantined image. Raises ManifestDamaged, OSError."""
    path = dataset / QUARANTINE_NAME
    try:
        listed = parse_canonical_json(read_small_file(path, MAX_QUARANTINE_BYTES, ManifestDamaged))
    except ValueError as error:
        raise ManifestDamaged(str(error), path=path) from error
    if not matches(listed, [{"key": str, "where": str, "reason": str}]):
        raise ManifestDamaged("is not a list of images with key, where and reason", path=path)
    return listed  # type: ignore[no-any-return]


def _has_plan_order(manifest: Manifest, index: Rows) -> bool:
    order, seed, keys = manifest.plan["order"], manifest.plan["seed"], index["key"]
    if manifest.skipped or order not in ("shuffled", "key"):  # the others are not by key
        return True
    if order == "shuffled":
        if not 0 <= seed <= MAX_SEED:
            return False
        by_key = np.empty_like(keys)
        by_key[permutation(len(keys), seed)] = keys
        keys = by_key
    return bool((keys[:-1] <= keys[1:]).all())
