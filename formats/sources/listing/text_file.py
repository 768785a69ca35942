"""Small text files of a source: lists of labels and of classes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.system.no_follow import open_below, open_folder
from shardprep.formats.system.regular_file import naming, open_regular, regular

from .tree_files import refuse_links

MAX_TEXT_BYTES = 64 << 20  # the largest, LOC_val_solution.csv, has 50,000 lines


def read_small_file(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file. Raises SourceDamaged for more than ``limit`` bytes, or if it is not a regular file."""
    with naming(path):
        return _read(open_regular(path), path, limit)


def read_small_below(top: Path, place: str, limit: int) -> bytes:
    """Read a file below a folder in the same way. Raises SourceDamaged for a link in its path, too."""
    path = top / place
    with naming(path):
        folder = open_folder(top)
        try:
            return _read(regular(open_below(folder, os.fsencode(place)), path), path, limit)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                refuse_links(top, path)
            raise
        finally:
            os.close(folder)


def _read(fd: int, path: Path, limit: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SourceDamaged(f"has more than {limit} bytes, too many for a file of this name", path=path)
    return data


def text_lines(data: bytes, path: Path | str) -> list[str]:
    """Return the lines of UTF-8 text. Raises SourceDamaged for other text."""
    try:
        return data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise SourceDamaged(f"is not UTF-8 text at byte {error.start}; copy it again", path=path) from error
