"""Commands on a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path


def on_terminal(*words: object, columns: int, cwd: Path | None = None) -> str:
    """Run ``prep`` with stderr on a terminal, and return what it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "shardprep.cli", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=cwd) as process:
        os.close(theirs)
        written = b"".join(iter(lambda: read(ours), b""))
        code = process.wait(timeout=60)
    os.close(ours)
    assert code == 0, written
    return written.decode()


def read(terminal: int) -> bytes:
    """What comes next; nothing when the other end is closed."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def states(written: str) -> list[str]:
    """The states of a bar that were shown one after the other."""
    return [state for state in written.replace("\n", "\r").split("\r") if "%|" in state]
