"""Files of columns that no manifest lists: those of a join that is not finished."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from shardprep.formats.system.atomic_write import flush_file

COLUMN_FILE = re.compile(r"column-[A-Za-z0-9_.-]+(\.npy|-\d{5,}\.(lmdb|h5))")


def unlisted_columns(dataset: Path, listed: Collection[str]) -> list[Path]:
    """Return the files of columns in the folder that are not among the names ``listed``, in order."""
    return sorted(
        path for path in dataset.iterdir() if COLUMN_FILE.fullmatch(path.name) and path.name not in listed
    )


def remove_unlisted_columns(dataset: Path, listed: Collection[str]) -> None:
    """Remove these files. The caller holds the lock of the folder's work."""
    for path in unlisted_columns(dataset, listed):
        path.unlink()
    flush_file(dataset)
