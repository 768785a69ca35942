"""The target of a measurement: open files, and a folder on the same disk that may be written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.dataset.manifest import MANIFEST_NAME, read_manifest
from shardprep.formats.errors import UsageError
from shardprep.formats.system.filesystem import filesystem_type
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.regular_file import OPEN_FLAGS, naming

from .scratch import write_scratch_file

MAX_FILES = 128  # far below any limit on a process's descriptors
RECORD_BYTES = 110_000  # the mean size of an ImageNet JPEG


@dataclass(frozen=True, eq=False)
class OpenFiles(Owned):
    """Descriptors that the stack closes; :meth:`open_direct` fills ``direct``."""

    stack: ExitStack
    descriptors: tuple[int, ...]
    direct: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Sequence[Path], stack: ExitStack) -> OpenFiles:
        """Open the files. Raises OSError, which names the file, where one cannot be opened or read."""
        return cls(stack, tuple(_opened(path, stack) for path in paths))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(os.fstat(descriptor).st_size for descriptor in self.descriptors)

    def open_direct(self) -> bool:
        """Open all files with O_DIRECT, and return whether that was possible. Idempotent."""
        flag = getattr(os, "O_DIRECT", 0)
        with suppress(OSError):
            for descriptor in self.descriptors[len(self.direct) :] if flag else ():
                name = f"/proc/self/fd/{descriptor}"  # a scratch file has no other name
                self.direct.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC | flag))
                self.stack.callback(os.close, self.direct[-1])
        return len(self.direct) == len(self.descriptors)


def _opened(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, OPEN_FLAGS)
    stack.callback(os.close, descriptor)
    with naming(path):
        os.pread(descriptor, 1, 0)
    return descriptor


@dataclass(frozen=True)
class Target:
    """Files to read, in a loader's order; ``kind`` is "file", "folder" or "dataset".

    ``place`` is a folder on the same disk in which files can be made; None where nothing may be written.
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
    """Open a file, the shards of a dataset, or a scratch file in a folder, which is written for ``seconds``.

    Raises UsageError for an empty file and for a path that is none of these, ManifestDamaged, NoSpace,
    OSError.
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
        raise UsageError("is empty: name a file that has content", path=path)
    return Target(path, "file", files, record_bytes or RECORD_BYTES, _place(path))


def _dataset(path: Path, stack: ExitStack, record_bytes: int | None) -> Target:
    manifest = read_manifest(path)
    shards = [path / name for name in manifest.image_files]
    chosen = _spread(shards)
    remarks = (f"{len(chosen)} of {len(shards)} shards were read",) if len(chosen) < len(shards) else ()
    mean = max(1, round(manifest.image_bytes / manifest.records))
    files = OpenFiles.of(chosen, stack)
    if 0 in files.sizes:
        raise UsageError("is empty; prep repair rebuilds it", path=chosen[files.sizes.index(0)])
    return Target(path, "dataset", files, record_bytes or mean, _place(path), remarks)


def _spread(shards: Sequence[Path]) -> list[Path]:
    """Return all shards, or as many as may be open, evenly chosen from the dataset."""
    count = min(len(shards), MAX_FILES)
    return [shards[number * len(shards) // count] for number in range(count)]


def _place(path: Path) -> Path | None:
    """Find a writable folder on the same disk: the path's parent first, then the path itself."""
    path = path.resolve()
    for folder in (path.parent, path):
        same = folder.is_dir() and folder.stat().st_dev == path.stat().st_dev
        if same and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None
