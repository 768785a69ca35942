"""The last steps of a shard's file: flushed, hashed, read back, compared and published."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.registry import container
from shardprep.formats.errors import CorruptRecord, OperationError, ShardprepError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.atomic_write import flush_file, hash_file, publish


def publish_shard(
    built: Path, final: Path, kind: str, crcs: npt.NDArray[np.uint32], expected: Mapping[str, str]
) -> str:
    """Check the file ``built``, move it to ``final``, and return its SHA-256.

    ``kind`` is the container, ``crcs`` are the records' checksums, and ``expected`` maps names of files to
    the SHA-256 that they must have. Raises CorruptRecord, OperationError for another SHA-256, OSError.
    """
    with ThreadPoolExecutor(1) as disk:  # flushes while this thread reads the file back
        with starting_thread():
            flushed = disk.submit(flush_file, built)
        sha256 = hash_file(built)
        check_written(built, kind, crcs)
        flushed.result()
    if expected.get(final.name, sha256) != sha256:
        raise _other_bytes(final, kind)
    publish(built, final)
    return sha256


def check_written(path: Path, kind: str, crcs: npt.NDArray[np.uint32]) -> None:
    """Read a shard back and compare each record's checksum. Raises CorruptRecord."""
    with container(kind).read(path) as reader:
        room = _Room()
        for ordinal, crc32c in enumerate(crcs.tolist()):
            if reader.checked_in(ordinal, room).crc32c != crc32c:
                raise CorruptRecord("reads back as another record than was written", path=path)
        if len(reader) != len(crcs):
            raise CorruptRecord(f"reads back {len(reader)} records of {len(crcs)}", path=path)


class _Room:
    """Memory for one image after the other, which spares the page faults of new memory for each."""

    def __init__(self) -> None:
        self._memory = np.empty(1 << 20, np.uint8)

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


def _other_bytes(path: Path, kind: str) -> ShardprepError:
    versions = ", ".join(f"{name} {v}" for name, v in container(kind).library().items())
    return OperationError(
        f"was rebuilt with other bytes than were published: the source has changed, or it was written with "
        f"other libraries than these ({versions}; prep inspect names those)",
        path=path,
    )
