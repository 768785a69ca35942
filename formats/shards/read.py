"""A dataset's tables, and its shards in every container, read by address: ``pread``, then the checksum.

In every container, a record is read by its place in the index: shard, offset and length. An index of format
1.0 has no offsets; then each is looked up in the container when the record is read. No file is memory-mapped:
a map of a truncated file, or on a failing disk, kills the process (SIGBUS), and its bytes can change after
they were checked.

Images may also stay in their archive, ``archive.tar`` in the dataset's folder, usually a link. Then a shard's
file is a table of the images' places there: .npy, one row per record.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import CorruptRecord, ManifestDamaged, OperationError, ShardDamaged, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES, record_crc
from shardprep.formats.runtime.files import (
    OPEN_FLAGS,
    hash_descriptor,
    hash_file,
    name_in_os_errors,
    open_regular,
    publish_bytes,
    read_at,
    read_into,
    temporary_path,
)
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.runtime.owners import Closable, Descriptor, Owner
from shardprep.formats.runtime.user_paths import caches_folder

MAX_TABLE_BYTES = 16 << 30  # the index of 280 million records

MANIFEST_NAME = "manifest.json"
ARCHIVE_NAME = "archive.tar"  # in a dataset's folder: the archive, or a link to it


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in the manifest: its name, size in bytes, SHA-256 and number of rows or records."""

    name: str
    size: int
    sha256: str
    records: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "sha256": self.sha256, "records": self.records}

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has this file, with these bytes. Raises OSError."""
        path = folder / self.name
        try:
            has_size = not path.is_symlink() and path.stat().st_size == self.size
            return has_size and hash_file(path) == self.sha256
        except FileNotFoundError:
            return False


@contextmanager
def open_published(path: Path, flags: int = OPEN_FLAGS) -> Iterator[int]:
    """Open a file for reading. Raises ManifestDamaged if it is not a regular file; OSError with its name."""
    with name_in_os_errors(path), closing(Descriptor(open_regular(path, flags, ManifestDamaged))) as file:
        yield file.fileno()


class ShardFile(Owner):
    """A file read by position, of ``size`` bytes when opened. Thread-safe. Raises OSError, also if closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = Descriptor(os.open(path, OPEN_FLAGS))
        self._number = self._descriptor.fileno()  # -1 once the file is closed
        with name_in_os_errors(path):
            self.size = os.fstat(self._number).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted, and takes space only because it is open."""
        return os.fstat(self._number).st_nlink == 0

    def read_at(self, length: int, offset: int) -> bytes:
        """Return ``length`` bytes from ``offset``, fewer only at the end of the file."""
        try:
            data = os.pread(self._number, length, offset)
            # here, because a further call takes 5% of a small read
            return data if len(data) == length else read_at(self._number, length, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset``; return the number of bytes read, fewer only at the end."""
        try:
            return read_into(self._number, memory, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._number = -1
        self._descriptor.close()


Rows = npt.NDArray[np.void]
RowType = np.dtype[np.void] | Callable[[int], np.dtype[np.void] | None]
"""The dtype of a table's rows, or a function that returns it for a row of a given size in bytes, or None."""


def write_table(file: BinaryIO, rows: Rows) -> None:
    """Write .npy version 1.0, determined by the rows; ``np.save``, through C's stdio, ignores disk errors."""
    file.write(table_header(rows.dtype, len(rows)))
    file.write(np.ascontiguousarray(rows).tobytes())


def read_table(path: Path, entry: FileEntry, row: RowType, *, seal: str | None = None) -> Rows:
    """Read the rows of a table in the manifest into memory, read-only.

    The file must begin with the header for the rows' dtype and number. With ``seal``, the root of the
    manifest, a file that has a :class:`.Seal` is not hashed, and any other gets one. Raises ManifestDamaged
    if the file differs from the manifest, or is not such a table; OSError.
    """
    if entry.size > MAX_TABLE_BYTES:
        raise ManifestDamaged(f"has {entry.size} bytes, more than any table", path=path)
    with open_published(path) as descriptor:
        status = os.fstat(descriptor)
        data = np.empty(min(entry.size, status.st_size), np.uint8)
        own_seal, is_intact = Seal(status, seal) if seal else None, False
        if status.st_size == entry.size == read_into(descriptor, data.data, 0):
            is_intact = own_seal is not None and own_seal.is_valid
            if not is_intact and f"sha256:{hashlib.sha256(data.data).hexdigest()}" == entry.sha256:
                is_intact = True
                if own_seal:
                    own_seal.store(descriptor)
    if not is_intact:
        raise ManifestDamaged("does not match the manifest; prep repair rebuilds it", path=path)
    start = 10 + int.from_bytes(data[8:10].tobytes(), "little")
    body = data[start:]
    row_dtype = row if isinstance(row, np.dtype) else row(len(body) // max(1, entry.records))
    if (
        row_dtype is None
        or len(body) != row_dtype.itemsize * entry.records
        or data[:start].tobytes() != table_header(row_dtype, entry.records)
    ):
        raise ManifestDamaged(f"is not a table of {entry.records} rows in this format", path=path)
    rows = body.view(row_dtype)
    rows.flags.writeable = False
    return rows


@lru_cache(4096)  # NumPy takes 20 µs, and tables of columns are opened again and again
def table_header(row: np.dtype[np.void], rows: int) -> bytes:
    header = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (rows,)}
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


class StoredRecord(NamedTuple):
    """A record as stored in a shard, unchecked; ``offset`` is the image's, in the shard file or archive."""

    key: bytes
    label: int
    crc32c: int
    image: bytes
    offset: int = 0


Memory = npt.NDArray[np.uint8]
Room = Callable[[int], Memory]
"""``room(length)`` returns contiguous, writable memory of that many bytes for an image."""

Address = tuple[bytes, int, int, int, int]
"""A record without its image: key, label, CRC-32C, and the image's offset and length in the file."""
ADDRESS = ("key", "label", "crc32c", "offset", "length")  # its columns, in the index, too


class ShardWriter(Owner, AbstractContextManager["ShardWriter"]):
    """Writes one shard, record by record. Equal records give equal bytes.

    Leaving the context finishes the file without flushing it to the disk; after an error, it only closes the
    file. Not thread-safe, not reusable.
    """

    @abstractmethod
    def append(self, stored: StoredRecord) -> None:
        """Store the next record. Raises OSError if the disk fails."""


Addresses = npt.NDArray[np.void]
"""The addresses of a shard's records, according to its container: one row each, with an Address's fields.

They are used to check a shard after it was written and in verification, and with an index of format 1.0.
"""


def address_dtype(key_bytes: int) -> np.dtype[np.void]:
    fixed = [("label", "<i4"), ("crc32c", "<u4"), ("offset", "<u8"), ("length", "<u8")]
    return np.dtype([("key", f"S{max(1, key_bytes)}"), *fixed])


def advice_for(link: Path) -> str:
    """Return the advice for an archive that is not the indexed one."""
    return (
        f"make {link} the indexed archive or a link to it, or index the one there with prep index into "
        "another folder"
    )


def not_indexed_error(link: Path, issue: str) -> ShardDamaged:
    """Return the error for an archive that is not the indexed one; it names the archive."""
    return ShardDamaged(f"{issue}; {advice_for(link)}", path=os.path.realpath(link))


MAX_ARCHIVE_BYTES = 1 << 62
BLOCK_BYTES = 4 << 20  # a disk that seeks in 10 ms and reads 150 MB/s spends a quarter of the time seeking


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of an archive that hold the images of a shard, and their ``sha256``, at first empty."""

    start: int
    stop: int
    sha256: str = ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class IndexedArchive:
    """The archive of a dataset, as in the manifest.

    ``name`` is the file's name when it was indexed, for information only. ``regions`` are those of the shards
    in stored order, and together the whole archive. A block has about ``block_bytes`` bytes of images.
    """

    name: str
    regions: tuple[Region, ...]
    block_bytes: int

    @property
    def size(self) -> int:
        return self.regions[-1].stop

    def to_json(self) -> dict[str, Any]:
        listed = [{"size": region.size, "sha256": region.sha256} for region in self.regions]
        return {"name": self.name, "block_bytes": self.block_bytes, "regions": listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> IndexedArchive:
        """Return the archive of a valid manifest."""
        stops = accumulate(each["size"] for each in value["regions"])
        regions = (
            Region(stop - each["size"], stop, each["sha256"])
            for stop, each in zip(stops, value["regions"], strict=True)
        )
        return cls(value["name"], tuple(regions), value["block_bytes"])

    def find_issue(self, dataset: Path) -> str:
        """Return what is wrong with the archive in a dataset's folder, or "". Raises OSError."""
        with suppress(FileNotFoundError):
            status = (dataset / ARCHIVE_NAME).stat()
            if stat.S_ISREG(status.st_mode) and status.st_size == self.size:
                return ""
        return f"is not there, or not a file of {self.size:,} bytes"

    def check(self, dataset: Path) -> None:
        """Raise ShardDamaged, naming the archive, if it has an :meth:`find_issue`; OSError."""
        if issue := self.find_issue(dataset):
            raise not_indexed_error(dataset / ARCHIVE_NAME, issue)


def changed_in(link: Path, region: Region) -> str:
    """Return the finding for a region whose bytes have changed."""
    return (
        f"the SHA-256 of bytes {region.start} to {region.stop} of {os.path.realpath(link)} differs from the "
        f"manifest; {advice_for(link)}"
    )


def is_linked(link: Path, archive: Path) -> bool:
    """Whether ``link`` leads to the archive, or is itself a file, which is never replaced."""
    return link.exists() and (not link.is_symlink() or link.samefile(archive))


def link_archive(link: Path, archive: Path, folder: Path) -> None:
    """Make ``link`` a link to the archive, atomically, by a rename from ``folder``; a file there stays."""
    if is_linked(link, archive):
        return
    temporary = temporary_path(folder, link.name)
    temporary.symlink_to(archive.resolve())
    temporary.replace(link)


def hash_region(archive: Path, region: Region) -> str:
    """Return ``sha256:<hex>`` of a region, cut at the end of the archive. Raises OSError."""
    with open_published(archive) as descriptor:
        return hash_descriptor(descriptor, region.start, region.stop)


@dataclass(frozen=True)
class Container:
    """One kind of shard: its writer, addresses, upper bound on its size, and its library's versions."""

    write: Callable[[Path, Unit], ShardWriter]
    """Takes the path of the shard, and its unit, whose size alone determines the sizes of files and maps."""
    addresses: Callable[[Path, ShardFile], Addresses]
    """Takes the path of the shard, and the file with its images. An image may end beyond the file.

    Raises ShardDamaged if the container is malformed, and OSError or MemoryError if the system fails.
    """
    bytes_needed: Callable[[Unit], int]
    library: Callable[[], dict[str, str | int]]


IN_PLACE = "tar"
SUFFIXES = {"lmdb": ".lmdb", "hdf5": ".h5", IN_PLACE: ".tar.npy"}
"""The suffix of a shard in each container."""
ALL_CONTAINERS = tuple(SUFFIXES)
CONTAINERS = tuple(name for name in SUFFIXES if name != IN_PLACE)
OUTPUT_FILES = re.compile(
    rf"(shard|column-[A-Za-z0-9_.-]+)-\d{{5,}}({'|'.join(map(re.escape, SUFFIXES.values()))})|"
    r"(index|boxes|column-[A-Za-z0-9_.-]+)\.npy|(quarantine|provenance)\.json"
)
"""The names of the files that a conversion writes, except the manifest."""


def container(name: str) -> Container:
    """Return the container with that name. Raises UsageError for an unknown name."""
    if name not in SUFFIXES:
        raise UsageError(f"unknown shard format {name!r}; choose from {', '.join(CONTAINERS)}")
    if name == IN_PLACE:  # no library: a table's bytes depend only on the records and their places
        return Container(TarTableWriter, addresses=read_places, bytes_needed=places_bytes, library=dict)
    module = import_module(f"shardprep.formats.shards.{name}")  # late, for start-up time
    return module.CONTAINER  # type: ignore[no-any-return]


MAX_PLACES_BYTES = 1 << 30  # of 20 million records
PLACES_HEADER_BYTES = 256  # more than any table's header

_SHAPE = re.compile(rb"'key', '\|S([1-9]\d{0,3})'.*'shape': \((0|[1-9]\d{0,9}),\)")


def place_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return a table's row dtype: the image's place in the archive, and the rest of its record."""
    fixed = [("offset", "<u8"), ("length", "<u4"), ("label", "<i4"), ("crc32c", "<u4")]
    return np.dtype([*fixed, ("key", f"S{max(1, key_bytes)}")])


def places_bytes(unit: Unit) -> int:
    """Return an upper bound on the file's size."""
    return PLACES_HEADER_BYTES + unit.records * place_dtype(unit.key_bytes).itemsize


class TarTableWriter(ShardWriter):
    """Writes a table when the context ends; does not look at the archive."""

    def __init__(self, path: Path, unit: Unit) -> None:
        self._file = path.open("xb")
        self._path = path
        self._rows = np.zeros(unit.records, place_dtype(unit.key_bytes))
        self._count = 0

    def append(self, stored: StoredRecord) -> None:
        key, label, crc32c, image, offset = stored
        self._rows[self._count] = (offset, len(image), label, crc32c, key)
        self._count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with name_in_os_errors(self._path), self._file:
            if kind is None:
                write_table(self._file, self._rows[: self._count])


def read_places(path: Path, archive: ShardFile) -> Addresses:
    """Read a table into memory. Raises ShardDamaged, MemoryError, OSError."""
    with closing(ShardFile(path)) as file:
        data = file.read_at(file.size, 0) if 10 < file.size <= MAX_PLACES_BYTES else bytes(10)
    start = 10 + int.from_bytes(data[8:10], "little")
    shape = _SHAPE.search(data[:start])
    key_bytes, records = (int(number) for number in shape.groups()) if shape else (0, 0)
    row = place_dtype(key_bytes)
    is_table = 1 <= key_bytes <= MAX_KEY_BYTES and data[:start] == table_header(row, records)
    if not is_table or len(data) - start != records * row.itemsize:
        raise ShardDamaged("is not a table of images in an archive; prep repair rebuilds it", path=path)
    return np.frombuffer(data, row, records, start)[[*ADDRESS]]


Image = TypeVar("Image", bytes, Memory)


class Shard(Owner, Closable):
    """The open file of a shard, read by addresses. Thread-safe except for :meth:`close`.

    ``entry`` is the shard's entry in the manifest; without it, the container's addresses are read at once.
    ``known`` keeps these by path, for shards that are opened again. Raises ShardDamaged for a malformed file,
    a size other than the entry's, or one that ends before a record; CorruptRecord for a record that does not
    match its checksum; and OSError if the system fails or memory is short. Errors name the record. A file
    that changes while it is open causes an error, never a signal.
    """

    def __init__(
        self,
        path: Path,
        container: str,
        entry: FileEntry | None = None,
        known: dict[Path, Addresses] | None = None,
    ) -> None:
        self.path = path
        self._container = container
        self._known = {} if known is None else known
        self._listed = entry.records if entry else None
        in_place = container == IN_PLACE
        images = path.with_name(ARCHIVE_NAME) if in_place else path
        try:
            self.file = ShardFile(images)
        except FileNotFoundError as error:
            if not in_place:
                raise
            raise not_indexed_error(images, "is not there") from error
        try:
            if entry is None:
                self._addresses  # noqa: B018 - reads and checks them
            elif not in_place and self.file.size != entry.size:
                message = f"has {self.file.size} bytes, not {entry.size}; prep repair rebuilds it"
                raise ShardDamaged(message, path=path)
        except BaseException:
            self.close()
            raise

    @property
    def _addresses(self) -> Addresses:
        if self.path in self._known:
            return self._known[self.path]
        try:
            addresses = container(self._container).addresses(self.path, self.file)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(self.path)) from error
        if self._listed not in (None, len(addresses)):
            raise ShardDamaged(f"has {len(addresses):,} records, not {self._listed:,}", path=self.path)
        self._known[self.path] = addresses
        return addresses

    @property
    def records(self) -> int:
        """The number of records, according to the container."""
        return len(self._addresses)

    def address(self, ordinal: int) -> Address:
        """Return the address of the record at an ordinal, according to the container."""
        try:
            if 0 <= ordinal < self.records:
                address: Address = self._addresses[ordinal].item()
                return address
        except (OSError, MemoryError) as error:
            raise self._read_error(ordinal, error) from error
        raise ShardDamaged(f"has no record {ordinal}", path=self.path)

    def read_record(self, ordinal: int) -> StoredRecord:
        """Return the record at an ordinal, according to the container, checked against its checksum."""
        address = self.address(ordinal)
        key, label, crc32c, offset, length = address
        if length > MAX_IMAGE_BYTES:
            raise ShardDamaged(f"has a record {ordinal} beyond the limit for images", path=self.path)
        image = self._read_checked(ordinal, address, self.file.read_at)
        return StoredRecord(key, label, crc32c, image, offset)

    def read_image(self, ordinal: int, address: Address) -> bytes:
        """Return the image at an address, after checking its record against its checksum."""
        return self._read_checked(ordinal, address, self.file.read_at)

    def read_image_into(self, ordinal: int, address: Address, room: Room) -> Memory:
        """Read the image at an address into ``room(length)``, check its record there, and return it."""

        def read_at(length: int, offset: int) -> Memory:
            memory = room(length)
            count = self.file.read_into(memory.data, offset)
            return memory if count == length else memory[:count]

        return self._read_checked(ordinal, address, read_at)

    def _read_checked(self, ordinal: int, address: Address, read_at: Callable[[int, int], Image]) -> Image:
        """Return the image that ``read_at(length, offset)`` reads, after checking its record."""
        key, label, crc32c, offset, length = address
        if not offset:  # format 1.0
            stored = self.address(ordinal)
            offset = stored[3]
            if stored != (key, label, crc32c, offset, length):
                raise self._checksum_error(ordinal, key)
        if offset + length > self.file.size:
            raise self._truncation_error(ordinal)
        try:
            image = read_at(length, offset)
        except (OSError, MemoryError) as error:
            raise self._read_error(ordinal, error) from error
        if len(image) != length:
            raise self._truncation_error(ordinal)
        if record_crc(key, label, image) != crc32c:
            raise self._checksum_error(ordinal, key)
        return image

    def _read_error(self, ordinal: int, error: OSError | MemoryError) -> OSError:
        number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno or errno.EIO
        return OSError(number, f"{os.strerror(number)}, at record {ordinal}", os.fspath(self.file.path))

    def _truncation_error(self, ordinal: int) -> ShardDamaged:
        return ShardDamaged(
            f"ends before record {ordinal} of {self.path.name} does; {self._advice}",
            path=os.path.realpath(self.file.path),
        )

    def _checksum_error(self, ordinal: int, key: bytes) -> CorruptRecord:
        return CorruptRecord(
            f"record {ordinal} does not match its CRC-32C; {self._advice}",
            path=self.path.parent if self.file.path == self.path else os.path.realpath(self.file.path),
            shard=self.path.name,
            key=key.decode("utf-8", "replace"),
        )

    @property
    def _advice(self) -> str:
        if self.file.path == self.path:
            return "prep repair rebuilds it"
        return f"the archive, or its table, has changed: {advice_for(self.file.path)}"

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.file.close()


DAMAGE = (CorruptRecord, ShardDamaged, OSError)
"""The errors of reading a file that is damaged on its disk, or was removed."""


class LocalFiles:
    """The files of a local dataset, which are neither fetched nor replaced."""

    def provide(self, entry: FileEntry) -> None:
        """Make a file available; called before it is opened."""

    def replace(self, entry: FileEntry, error: Exception) -> AbstractContextManager[None]:
        """Replace a file whose reading raised ``error``, and keep it in the context; or raise ``error``."""
        raise error


LOCAL = LocalFiles()


MIN_BYTES = 16 << 20  # fewer are hashed in 10 ms
YOUNG_NS = 2_000_000_000  # FAT has the coarsest timestamps, of two seconds


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with a file: its device, inode, size, mtime and ctime."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class Seal:
    """The seal of a file verified against the digest ``root``; ``status`` is from before it was read."""

    status: os.stat_result
    root: str

    @property
    def is_valid(self) -> bool:
        """Whether the file was verified before against ``root``, and has not changed since."""
        with suppress(OSError, RuntimeError):
            return self._path.read_bytes() == self._text
        return False

    def store(self, descriptor: int) -> bool:
        """Store the seal of a verified file; return whether that succeeded.

        ``descriptor`` is of the file, after it was read. A file that changed in the meantime or just before
        gets no seal, nor does one smaller than MIN_BYTES.
        """
        # a change now could leave times unchanged that are young, or in the future
        age_ns = time.time_ns() - max(self.status.st_mtime_ns, self.status.st_ctime_ns)
        is_changed = file_state(os.fstat(descriptor)) != file_state(self.status)
        if self.status.st_size < MIN_BYTES or age_ns < YOUNG_NS or is_changed:
            return False
        with suppress(OSError, RuntimeError, OperationError):
            # A power cut may change the bytes of an unflushed file, and not its times.
            if not os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:  # squashfs refuses to flush
                os.fsync(descriptor)
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish_bytes(self._path, self._text, self._path.parent)
            return True
        return False

    @property
    def _path(self) -> Path:
        return caches_folder() / "seals" / f"{self.status.st_dev:x}-{self.status.st_ino:x}.json"

    @property
    def _text(self) -> bytes:
        return f"shardprep seal 1\n{self.root}\n{' '.join(map(str, file_state(self.status)))}\n".encode()
