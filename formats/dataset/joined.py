"""Columns that were joined to a dataset after its conversion, and files of a join that is not finished."""

from __future__ import annotations

import re
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.system.atomic_write import flush_file

from .manifest import WORK_FOLDER_NAME, Manifest

JOINED = "joined"  # in the manifest's source: a list of an object with the name of each joined column
COLUMN_FILE = re.compile(r"column-[A-Za-z0-9_.-]+(\.npy|-\d{5,}\.(lmdb|h5))")


def joined_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the columns that were joined."""
    joined = manifest.source.get(JOINED)
    names = [one.get("name") for one in joined if isinstance(one, dict)] if isinstance(joined, list) else []
    return tuple(name for name in names if isinstance(name, str) and name in manifest.schema)


def joined_files(manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return the files of the columns that were joined: the source of the conversion has not their values."""
    columns = manifest.columns
    return tuple(file for name in joined_names(manifest) if columns for file in columns[name].files)


def unfinished_columns(dataset: Path, manifest: Manifest) -> list[Path]:
    """Return files of columns that the manifest does not list, while work on the dataset is unfinished."""
    if not (dataset / WORK_FOLDER_NAME).is_dir():
        return []
    listed = {file.name for file in manifest.files}
    return sorted(
        path for path in dataset.iterdir() if COLUMN_FILE.fullmatch(path.name) and path.name not in listed
    )


def remove_unlisted_columns(dataset: Path, manifest: Manifest) -> None:
    """Remove the files of columns of a join that was not finished."""
    for path in unfinished_columns(dataset, manifest):
        path.unlink()
    flush_file(dataset)
