"""Shards in HDF5: flat and plain, so that any HDF5 tool reads them and nothing can hide in them.

``data`` uint8 contiguous (all images one after the other), ``offsets`` int64 [n+1] into it,
``labels`` int32, ``keys`` fixed-width bytes, ``crc32c`` uint32. Nothing else may be there.

libhdf5 never writes to the disk here: it crashes the process when the disk fills up, and a file
that it failed to write reads back, in the same process, as if all were well. It makes the file's
skeleton in memory (a few KB beside the small columns); the images go out by ordinary writes.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from .errors import ShardDamaged
from .shard import Container, Memory, Placed, Room, ShardReader, ShardWriter, Stored

if TYPE_CHECKING:
    from .plan import Extent

DATA_OFFSET = 1072  # where the first dataset of a file without options begins, in every HDF5 since 1.8
WRITE_BYTES = 1 << 20
COLUMNS = {"data": "u1", "offsets": "<i8", "labels": "<i4", "keys": "S", "crc32c": "<u4"}


def bytes_needed(extent: Extent) -> int:
    """Upper bound of the file's size."""
    return DATA_OFFSET + extent.payload_bytes + extent.records * (extent.key_bytes + 16) + 8192


class _Skeleton(io.RawIOBase):
    """A file that remembers what libhdf5 wrote where: the headers and small columns, not the data."""

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
        """Nothing to flush: the parts are taken when the file is closed."""


def _create(file: h5py.File, name: str, values: npt.NDArray[Any] | int) -> None:
    """A contiguous dataset without fill, filter, time or attribute; an int is a size left unwritten."""
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
    """Streams images to where ``data`` lies and puts the skeleton around them at the end."""

    def __init__(self, path: Path, extent: Extent) -> None:
        self._file = path.open("wb", buffering=WRITE_BYTES)
        self._file.seek(DATA_OFFSET)
        self._offsets = [0]
        self._rows: list[tuple[bytes, int, int]] = []

    def append(self, stored: Stored) -> None:
        self._file.write(stored.image)
        self._offsets.append(self._offsets[-1] + len(stored.image))
        self._rows.append((stored.key, stored.label, stored.crc32c))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with self._file:
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


class Hdf5ShardReader(ShardReader):
    """Takes the small columns and the place of ``data`` through libhdf5, images by ``pread``."""

    _descriptor: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                self._take(file)
        except ShardDamaged as error:
            error.path = os.fspath(self.path)
            raise
        except (OSError, KeyError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno == errno.EIO:
                raise
            raise ShardDamaged(f"is not a readable HDF5 shard: {error}", path=self.path) from error

    def _take(self, file: h5py.File) -> None:
        datasets = plain_datasets(file)
        self._offsets: npt.NDArray[np.int64] = datasets["offsets"][()]
        self._keys, self._labels, self._crcs = (datasets[c][()] for c in ("keys", "labels", "crc32c"))
        self._start: int = datasets["data"].id.get_offset() or 0
        bounds = self._offsets
        if bounds[0] != 0 or bounds[-1] != datasets["data"].shape[0] or (bounds[1:] < bounds[:-1]).any():
            raise ShardDamaged("its offsets do not divide its data")

    def __len__(self) -> int:
        return len(self._labels)

    def stored(self, ordinal: int) -> Stored:
        descriptor, start, size = self._place(ordinal)
        image = os.pread(descriptor, size, start)
        self._refuse_short(ordinal, len(image), size)
        return Stored(*self._head(ordinal), image)

    def placed(self, ordinal: int, room: Room) -> Placed:
        descriptor, start, size = self._place(ordinal)
        place = room(size)
        self._refuse_short(ordinal, _read_into(place, descriptor, start), size)
        return Placed(*self._head(ordinal), place)

    def _place(self, ordinal: int) -> tuple[int, int, int]:
        """Descriptor, offset and size of an image."""
        if not 0 <= ordinal < len(self):
            raise ShardDamaged(f"has no record {ordinal}", path=self.path)
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        start, stop = int(self._offsets[ordinal]), int(self._offsets[ordinal + 1])
        return self._descriptor, self._start + start, stop - start

    def _head(self, ordinal: int) -> tuple[bytes, int, int]:
        return self._keys[ordinal], int(self._labels[ordinal]), int(self._crcs[ordinal])

    def _refuse_short(self, ordinal: int, got: int, size: int) -> None:
        if got != size:
            raise ShardDamaged(f"ends before record {ordinal} does", path=self.path)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read_into(place: Memory, descriptor: int, offset: int) -> int:
    """How many bytes there were to fill ``place`` with; the kernel may give them piece by piece."""
    done = 0
    while done < place.size and (got := os.preadv(descriptor, [place[done:].data], offset + done)):
        done += got
    return done


def plain_datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """The five datasets, after checking that they are all there is, and as plain as can be.

    An allow-list, because every deny-list so far missed a way to point at other files.
    """
    names = set(file.id)
    if names != {name.encode() for name in COLUMNS}:
        raise ShardDamaged(f"holds {sorted(n.decode('utf-8', 'replace') for n in names)}")
    if any(file.id.links.get_info(n).type != h5py.h5l.TYPE_HARD for n in names) or file.attrs:
        raise ShardDamaged("holds links or attributes")
    datasets = {name: file[name] for name in COLUMNS}
    for name, dataset in datasets.items():
        _check_plain(name, dataset, Path(file.filename).stat().st_size)
    records = len(datasets["labels"])
    if [len(datasets[c]) for c in ("keys", "crc32c", "offsets")] != [records, records, records + 1]:
        raise ShardDamaged("its columns differ in length")
    return datasets


def _check_plain(name: str, dataset: Any, file_size: int) -> None:
    if not isinstance(dataset, h5py.Dataset) or dataset.attrs:
        raise ShardDamaged(f"{name} is not a plain dataset")
    options = dataset.id.get_create_plist()
    plain = options.get_layout() == h5py.h5d.CONTIGUOUS and not options.get_nfilters()
    if not plain or options.get_external_count() or dataset.ndim != 1:
        raise ShardDamaged(f"{name} is not contiguous, or lies elsewhere")
    kind = dataset.dtype
    if kind.kind != "S" if name == "keys" else kind != np.dtype(COLUMNS[name]):
        raise ShardDamaged(f"{name} is of type {kind}")
    start, size = dataset.id.get_offset() or 0, dataset.shape[0] * kind.itemsize
    if start + size > file_size:
        raise ShardDamaged(f"{name} ends behind the end of the file")


def library() -> dict[str, str | int]:
    """What besides the records decides the bytes of a file."""
    return {"hdf5": h5py.version.hdf5_version}


CONTAINER = Container(write=Hdf5ShardWriter, read=Hdf5ShardReader, bytes_needed=bytes_needed, library=library)
