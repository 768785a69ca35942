"""What may happen to a file that is read."""

import os
import shutil
from collections.abc import Callable
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
