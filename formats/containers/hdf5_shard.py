"""Shards in HDF5: flat and plain, so that any HDF5 tool reads them and nothing can be hidden in them.

``data`` uint8 contiguous (all images one after the other), ``offsets`` int64 [n+1] into it,
``labels`` int32, ``keys`` fixed-width bytes, ``crc32c`` uint32. Any other content is refused.

libhdf5 never writes to the disk here: it crashes the process when the disk fills up, and after a
failed write the same process reads the file back without an error. It makes the headers and the
small columns in memory; the images are written with ordinary writes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from shardprep.formats.system.regular_file import naming

from .container import Container, ShardWriter, Stored
from .hdf5_reader import Hdf5ShardReader

if TYPE_CHECKING:
    from .container import Extent

DATA_OFFSET = 1072  # of the first dataset in a file without options, in every HDF5 since 1.8
WRITE_BYTES = 1 << 20


def bytes_needed(extent: Extent) -> int:
    """Return an upper bound of the file's size."""
    return DATA_OFFSET + extent.payload_bytes + extent.records * (extent.key_bytes + 16) + 8192


class _Skeleton(io.RawIOBase):
    """A file object that keeps what libhdf5 writes, by offset: headers and small columns, not the data."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.size = 0
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        part = bytes(data)
        self.parts[self._position] = part
        self._position += len(part)
        self.size = max(self.size, self._position)
        return len(part)

    def readinto(self, buffer: Any) -> int:
        raise io.UnsupportedOperation("a skeleton is written in one go and never read back")

    def flush(self) -> None:
        """Do nothing: the parts are used when the file is closed."""


def _create(file: h5py.File, name: str, values: npt.NDArray[Any] | int) -> None:
    """Create a contiguous dataset without fill, filter, time or attribute; an int is an unwritten size."""
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
    """Writer that streams images into ``data``, and writes the headers and columns at the end."""

    def __init__(self, path: Path, extent: Extent) -> None:
        self._path = path
        self._file = path.open("wb", buffering=WRITE_BYTES)
        self._file.seek(DATA_OFFSET)
        self._offsets = [0]
        self._rows: list[tuple[bytes, int, int]] = []

    def append(self, stored: Stored, offset: int = 0) -> None:
        with naming(self._path):
            self._file.write(stored.image)
        self._offsets.append(self._offsets[-1] + len(stored.image))
        self._rows.append((stored.key, stored.label, stored.crc32c))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with naming(self._path), self._file:
            if kind is None:
                self._finish(self._skeleton())

    def _skeleton(self) -> _Skeleton:
        keys, labels, crcs = zip(*self._rows, strict=True) if self._rows else ((), (), ())
        skeleton = _Skeleton()
        with h5py.File(skeleton, "w", libver="earliest") as file:
            _create(file, "data", self._offsets[-1])
            _create(file, "offsets", np.array(self._offsets, "<i8"))
            _create(file, "labels", np.array(labels, "<i4"))
            _create(file, "keys", np.array(keys, f"S{max(map(len, keys), default=1)}"))
            _create(file, "crc32c", np.array(crcs, "<u4"))
        return skeleton

    def _finish(self, skeleton: _Skeleton) -> None:
        for position, part in sorted(skeleton.parts.items()):
            self._file.seek(position)
            self._file.write(part)
        self._file.truncate(skeleton.size)


def library() -> dict[str, str | int]:
    """Return the versions that decide the bytes of a file besides the records."""
    return {"hdf5": h5py.version.hdf5_version}


CONTAINER = Container(write=Hdf5ShardWriter, read=Hdf5ShardReader, bytes_needed=bytes_needed, library=library)
