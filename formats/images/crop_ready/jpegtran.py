"""jpegtran, libjpeg-turbo's program that changes how a JPEG is coded, and none of its coefficients.

No wheel offers restart intervals for unchanged coefficients. The program runs without a shell.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from typing import BinaryIO

from shardprep.formats.errors import BadImage, OperationError

PROGRAM = "jpegtran"
MAX_MESSAGE = 4096  # bytes of what the program says that are kept


@cache
def jpegtran() -> str:
    """Return the path of the program. Raises OperationError if it is not there."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise OperationError(
            f"crop-ready shards need the program {PROGRAM} of libjpeg-turbo: install the package "
            "libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or jpeg-turbo (Homebrew)"
        )
    return found


@cache
def jpegtran_version() -> str:
    """Return the program's version, such as "libjpeg-turbo 2.1.5". Raises OperationError."""
    done = subprocess.run(
        [jpegtran(), "-version"], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    known = re.search(r"libjpeg-turbo version (\d+(?:\.\d+)+)", said)
    if known is None:
        raise OperationError(f"{jpegtran()} is not libjpeg-turbo's: it says {said.strip()[:200]!r}")
    return f"libjpeg-turbo {known[1]}"


def transcode(image: bytes, *, interval: int) -> bytes:
    """Return a JPEG with the same coefficients and metadata, and a restart marker every ``interval`` MCUs.

    It is sequential, with optimised Huffman tables. Raises BadImage where the program fails, OperationError
    and OSError.
    """
    with _memory_file() as given, _memory_file() as made, _memory_file() as said:
        given.write(image)
        given.seek(0)
        command = [jpegtran(), "-optimize", "-copy", "all", "-restart", f"{interval}B"]
        done = subprocess.run(command, stdin=given, stdout=made, stderr=said, env={}, check=False)
        if done.returncode:
            reason = os.pread(said.fileno(), MAX_MESSAGE, 0).decode("utf-8", "replace").strip()
            raise BadImage(f"{PROGRAM} ended with {done.returncode}: {reason}")
        made.seek(0)
        return made.read()


def _memory_file() -> BinaryIO:
    """A file in memory, because a process takes a tenth longer with pipes."""
    return os.fdopen(os.memfd_create(PROGRAM), "w+b")
