"""Changes to a file while it is read."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "grown": lambda path: os.truncate(path, path.stat().st_size + 512),
    "rewritten": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "touched": lambda path: os.utime(path, ns=(1, 1)),
    "a copy": lambda path: Path(shutil.copy2(path, path.with_name("copy"))).replace(path),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "gone": Path.unlink,
}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
