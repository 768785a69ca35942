"""Shards in HDF5: flat and plain, so that any HDF5 tool reads them and nothing can hide in them.

``data`` uint8 contiguous (all images, concatenated), ``offsets`` int64 [n+1] into it, ``labels`` int32,
``keys`` fixed-width bytes, ``crc32c`` uint32. Any other content is refused.

libhdf5 reads only the small columns, through a file object that tells system errors from damage; images are
read by position. It never writes to the disk: when the disk fills up, it crashes the process, and after a
failed write the same process reads the file back without an error. So it builds headers and small columns in
memory, and images are written with ordinary writes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.runtime.files import name_in_os_errors
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.shards.read import (
    Addresses,
    Container,
    ShardFile,
    ShardWriter,
    StoredRecord,
    address_dtype,
)

COLUMNS = {"data": "u1", "offsets": "<i8", "labels": "<i4", "keys": "S", "crc32c": "<u4"}

MEMORY_TO_OPEN = 16 << 20  # more than libhdf5 needs besides the columns


def addresses(path: Path, file: ShardFile) -> Addresses:
    """Read a shard's small columns, and locate ``data``. Raises ShardDamaged, MemoryError, OSError."""
    stream = _ShardStream(file)
    try:
        bytearray(MEMORY_TO_OPEN)  # libhdf5 may crash if an allocation fails
        with h5py.File(stream, "r") as opened:
            datasets = check_datasets(opened, file.size)
            bounds: npt.NDArray[np.int64] = datasets["offsets"][()]
            keys, labels, crcs = (datasets[name][()] for name in ("keys", "labels", "crc32c"))
            start = datasets["data"].id.get_offset() or 0
            size = datasets["data"].shape[0]
    except ShardDamaged as error:
        raise stream.error or ShardDamaged(error.message, path=path) from error
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        damage = ShardDamaged(f"is not a readable HDF5 shard: {error}", path=path)
        raise stream.error or damage from error
    if bounds[0] != 0 or bounds[-1] != size or (bounds[1:] < bounds[:-1]).any():
        raise ShardDamaged("its offsets do not divide its data", path=path)
    columns = [keys, labels, crcs, start + bounds[:-1], np.diff(bounds)]
    return np.rec.fromarrays(columns, dtype=address_dtype(keys.itemsize))


class _FileObject(io.RawIOBase):
    """A file object for libhdf5."""

    size = 0
    _position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class _ShardStream(Owner, _FileObject):
    """A shard that libhdf5 reads. ``error`` keeps the system's error, which libhdf5 replaces."""

    def __init__(self, file: ShardFile) -> None:
        self.error: OSError | None = None
        self._file, self.size = file, file.size

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or raise ValueError: libhdf5 ignores the number of bytes returned."""
        memory = memoryview(buffer).cast("B")
        end = self._position + len(memory)
        try:
            count = self._file.read_into(memory, self._position) if end <= self.size else 0
        except OSError as error:
            self.error = error
            raise
        if count != len(memory):
            raise ValueError(f"it ends before byte {end}")
        self._position = end
        return count


def check_datasets(file: h5py.File, size: int) -> dict[str, h5py.Dataset]:
    """Return the five datasets, after checking that they are plain and the file has no others.

    It is an allow-list because every deny-list so far missed a way to point at other files.
    """
    names = set(file.id)
    if names != {name.encode() for name in COLUMNS} or file.attrs:
        raise ShardDamaged("holds other datasets or attributes than a shard")
    if any(file.id.links.get_info(n).type != h5py.h5l.TYPE_HARD for n in names):
        raise ShardDamaged("holds links")
    datasets = {name: file[name] for name in COLUMNS}
    for name, dataset in datasets.items():
        if not _is_plain(name, dataset, size):
            raise ShardDamaged(f"{name} is not a plain, contiguous dataset of its type within the file")
    records = len(datasets["labels"])
    if [len(datasets[c]) for c in ("keys", "crc32c", "offsets")] != [records, records, records + 1]:
        raise ShardDamaged("its columns differ in length")
    return datasets


def _is_plain(name: str, dataset: Any, file_size: int) -> bool:
    if not isinstance(dataset, h5py.Dataset) or dataset.attrs or dataset.ndim != 1:
        return False
    options, kind = dataset.id.get_create_plist(), dataset.dtype
    is_contiguous = options.get_layout() == h5py.h5d.CONTIGUOUS and not options.get_nfilters()
    is_right = kind.kind == "S" if name == "keys" else kind == np.dtype(COLUMNS[name])
    end = (dataset.id.get_offset() or 0) + dataset.shape[0] * kind.itemsize
    return is_contiguous and not options.get_external_count() and is_right and end <= file_size


DATA_OFFSET = 1072  # of the first dataset in a file without options, in every HDF5 since 1.8
WRITE_BYTES = 1 << 20


def bytes_needed(unit: Unit) -> int:
    """Return an upper bound on the file's size."""
    return DATA_OFFSET + unit.size + unit.records * (unit.key_bytes + 16) + 8192


class _Skeleton(_FileObject):
    """Collects what libhdf5 writes, by offset: headers and small columns, not the data."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        part = bytes(data)
        self.parts[self._position] = part
        self._position += len(part)
        self.size = max(self.size, self._position)
        return len(part)


def _create(file: h5py.File, name: str, values: npt.NDArray[Any] | int) -> None:
    """Create a contiguous dataset without fill, filter, time or attribute; for an int, one of that size."""
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_layout(h5py.h5d.CONTIGUOUS)
    options.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    options.set_obj_track_times(False)
    shape = (values,) if isinstance(values, int) else values.shape
    kind = np.dtype("u1") if isinstance(values, int) else values.dtype
    space = h5py.h5s.create_simple(shape)
    dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(kind, logical=True), space, options)
    if not isinstance(values, int) and values.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    if name == "data" and values and dataset.get_offset() != DATA_OFFSET:
        raise RuntimeError(f"this HDF5 puts data at {dataset.get_offset()}, not at {DATA_OFFSET}")


class Hdf5ShardWriter(ShardWriter):
    """Streams images into ``data``, and writes the headers and columns at the end."""

    def __init__(self, path: Path, unit: Unit) -> None:
        self._path = path
        self._file = path.open("wb", buffering=WRITE_BYTES)
        self._file.seek(DATA_OFFSET)
        self._offsets = [0]
        self._rows: list[tuple[bytes, int, int]] = []

    def append(self, stored: StoredRecord) -> None:
        with name_in_os_errors(self._path):
            self._file.write(stored.image)
        self._offsets.append(self._offsets[-1] + len(stored.image))
        self._rows.append((stored.key, stored.label, stored.crc32c))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with name_in_os_errors(self._path), self._file:
            if kind is not None:
                return
            keys, labels, crcs = zip(*self._rows, strict=True) if self._rows else ((), (), ())
            skeleton = _Skeleton()
            with h5py.File(skeleton, "w", libver="earliest") as file:
                _create(file, "data", self._offsets[-1])
                _create(file, "offsets", np.array(self._offsets, "<i8"))
                _create(file, "labels", np.array(labels, "<i4"))
                _create(file, "keys", np.array(keys, f"S{max(map(len, keys), default=1)}"))
                _create(file, "crc32c", np.array(crcs, "<u4"))
            for position, part in sorted(skeleton.parts.items()):
                self._file.seek(position)
                self._file.write(part)
            self._file.truncate(skeleton.size)


def library() -> dict[str, str | int]:
    """Return the versions that determine a file's bytes besides its records."""
    return {"hdf5": h5py.version.hdf5_version}


CONTAINER = Container(write=Hdf5ShardWriter, addresses=addresses, bytes_needed=bytes_needed, library=library)
