"""Small text files of a source: lists of labels and of classes."""

from __future__ import annotations

import os
from pathlib import Path

from .archive_file import naming, open_regular
from .errors import SourceDamaged

MAX_TEXT_BYTES = 64 << 20  # the largest, LOC_val_solution.csv, has 50,000 lines


def read_small_file(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Raises SourceDamaged for more than ``limit`` bytes and for what is not a regular file."""
    with naming(path), os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SourceDamaged(f"has more than {limit} bytes, which is not what its name promises", path=path)
    return data


def text_lines(data: bytes, path: Path | str) -> list[str]:
    """The lines of UTF-8 text. Raises SourceDamaged where it is not."""
    try:
        return data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise SourceDamaged(f"is not UTF-8 text at byte {error.start}; copy it again", path=path) from None
