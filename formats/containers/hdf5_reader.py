"""The reader of shards in HDF5: libhdf5 reads the small columns, and images are read by position.

libhdf5 reads through a file object of this module, which keeps the errors of the system apart from damage.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.system.owned import Owned

from .container import Found, ShardReader
from .shard_file import ShardFile

COLUMNS = {"data": "u1", "offsets": "<i8", "labels": "<i4", "keys": "S", "crc32c": "<u4"}

MEMORY_TO_OPEN = 16 << 20  # more than libhdf5 needs besides the columns


class Hdf5ShardReader(ShardReader):
    """Reader of one shard, with the small columns in memory and the offset of ``data``."""

    def _open(self) -> None:
        stream = _ShardStream(self._file)
        try:
            bytearray(MEMORY_TO_OPEN)  # libhdf5 may crash if an allocation fails
            with h5py.File(stream, "r") as file:
                self._take(file)
        except ShardDamaged as error:
            raise stream.error or ShardDamaged(error.message, path=self.path) from error
        except (OSError, KeyError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise self._explained(error, stream.error) from error

    def _explained(self, error: Exception, of_system: OSError | None) -> Exception:
        """Return the error for the cause: the system, too little memory, or the file."""
        if of_system is not None:
            return of_system
        if isinstance(error, MemoryError):
            return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(self.path))
        return ShardDamaged(f"is not a readable HDF5 shard: {error}", path=self.path)

    def _take(self, file: h5py.File) -> None:
        datasets = plain_datasets(file, self._file.size)
        self._offsets: npt.NDArray[np.int64] = datasets["offsets"][()]
        self._keys, self._labels, self._crcs = (datasets[c][()] for c in ("keys", "labels", "crc32c"))
        self._start: int = datasets["data"].id.get_offset() or 0
        bounds = self._offsets
        if bounds[0] != 0 or bounds[-1] != datasets["data"].shape[0] or (bounds[1:] < bounds[:-1]).any():
            raise ShardDamaged("its offsets do not divide its data")

    def __len__(self) -> int:
        return len(self._labels)

    def _find(self, ordinal: int) -> Found:
        start, stop = int(self._offsets[ordinal]), int(self._offsets[ordinal + 1])
        label, crc32c = int(self._labels[ordinal]), int(self._crcs[ordinal])
        return self._keys[ordinal], label, crc32c, self._start + start, stop - start


class _ShardStream(Owned, io.RawIOBase):
    """The file object that libhdf5 reads. ``error`` keeps the system's error, which libhdf5 replaces."""

    def __init__(self, file: ShardFile) -> None:
        self.error: OSError | None = None
        self._file = file
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or raise ValueError: libhdf5 ignores the number of bytes returned."""
        memory = memoryview(buffer).cast("B")
        end = self._position + len(memory)
        try:
            count = self._file.read_into(memory, self._position) if end <= self._file.size else 0
        except OSError as error:
            self.error = error
            raise
        if count != len(memory):
            raise ValueError(f"it ends before byte {end}")
        self._position = end
        return count


def plain_datasets(file: h5py.File, size: int) -> dict[str, h5py.Dataset]:
    """Return the five datasets, after checking that the file has no others, and that these are plain.

    This is an allow-list, because every deny-list so far missed a way to point at other files.
    """
    names = set(file.id)
    if names != {name.encode() for name in COLUMNS}:
        raise ShardDamaged(f"holds {sorted(n.decode('utf-8', 'replace') for n in names)}")
    if any(file.id.links.get_info(n).type != h5py.h5l.TYPE_HARD for n in names) or file.attrs:
        raise ShardDamaged("holds links or attributes")
    datasets = {name: file[name] for name in COLUMNS}
    for name, dataset in datasets.items():
        _check_plain(name, dataset, size)
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
        raise ShardDamaged(f"{name} ends after the end of the file")
