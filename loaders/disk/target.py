"""What is measured: the open files of a PATH, and the folder in which something may be written beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...formats.errors import UsageError
from ...formats.filesystem import filesystem_type
from ...formats.manifest import MANIFEST_NAME, read_manifest
from .open_files import OpenFiles
from .scratch_file import write_scratch_file

MAX_FILES = 128  # far fewer descriptors than any process may have
RECORD_BYTES = 110_000  # of an ImageNet JPEG on average


@dataclass(frozen=True)
class Target:
    """Files to read, in the order in which a loader would; ``kind`` is "file", "folder" or "dataset".

    ``place`` is where files can be made on the same disk, None where nothing may be written.
    """

    path: Path
    kind: str
    files: OpenFiles
    record_bytes: int
    place: Path | None
    remarks: tuple[str, ...] = ()

    @property
    def filesystem(self) -> str:
        return filesystem_type(self.path)


@contextmanager
def open_target(path: Path, *, seconds: float, record_bytes: int | None) -> Iterator[Target]:
    """Open a file, the shards of a dataset, or a scratch file in a folder, written for so many seconds.

    Raises UsageError for an empty file and for what is none of these, ManifestDamaged, NoSpace, OSError.
    """
    with ExitStack() as stack:
        if not path.is_dir():
            yield _file(path, stack, record_bytes)
        elif (path / MANIFEST_NAME).exists():
            yield _dataset(path, stack, record_bytes)
        else:
            descriptor = write_scratch_file(path, stack, seconds=seconds)
            files = OpenFiles(stack, (descriptor,))
            yield Target(path, "folder", files, record_bytes or RECORD_BYTES, path)


def _file(path: Path, stack: ExitStack, record_bytes: int | None) -> Target:
    if path.exists() and not path.is_file():
        raise UsageError("is neither a file nor a folder", path=path)
    files = OpenFiles.of([path], stack)
    if files.sizes == (0,):
        raise UsageError("is empty: name a file that has something to read", path=path)
    return Target(path, "file", files, record_bytes or RECORD_BYTES, _place(path))


def _dataset(path: Path, stack: ExitStack, record_bytes: int | None) -> Target:
    manifest = read_manifest(path)
    shards = [path / shard.name for shard in manifest.shards if shard.size]
    chosen = _spread(shards)
    remarks = (f"{len(chosen)} of {len(shards)} shards were read",) if len(chosen) < len(shards) else ()
    mean = max(1, round(manifest.image_bytes / manifest.records))
    files = OpenFiles.of(chosen, stack)
    if 0 in files.sizes:
        raise UsageError("is empty; prep repair rebuilds it", path=chosen[files.sizes.index(0)])
    return Target(path, "dataset", files, record_bytes or mean, _place(path), remarks)


def _spread(shards: Sequence[Path]) -> list[Path]:
    """All of them, or as many as may be open, evenly over the dataset."""
    count = min(len(shards), MAX_FILES)
    return [shards[number * len(shards) // count] for number in range(count)]


def _place(path: Path) -> Path | None:
    """A folder on the same disk that may be written, beside the path before inside it."""
    path = path.resolve()
    for folder in (path.parent, path):
        same = folder.is_dir() and folder.stat().st_dev == path.stat().st_dev
        if same and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None
