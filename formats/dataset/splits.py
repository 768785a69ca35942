"""A folder of splits: one dataset in each of its sub-folders, as a conversion of a whole source leaves it."""

from __future__ import annotations

import os
from pathlib import Path

from shardprep.formats.errors import UsageError

from .index import INDEX_NAME
from .manifest import COLLECTION_NAME, MANIFEST_NAME, WORK_FOLDER_NAME

USUAL_ORDER = ("train", "val", "test")
MARKS = (MANIFEST_NAME, INDEX_NAME, WORK_FOLDER_NAME)  # also of one that is unfinished, or lost its manifest


def splits_of(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the datasets in the sub-folders of ``folder``, by name: train, val, test, then all others.

    A dataset that is not finished, or has lost its manifest, is one of them: reading it says so. Empty where
    ``folder`` is a dataset or a collection itself, holds none, or is no folder. Raises OSError.
    """
    path = Path(folder)
    if not path.is_dir() or _is_dataset(path) or is_collection(path):
        return {}
    found = {sub.name: sub for sub in path.iterdir() if _is_dataset(sub)}
    usual = [name for name in USUAL_ORDER if name in found]
    return {name: found[name] for name in (*usual, *sorted(found.keys() - set(usual)))}


def is_collection(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has a collection.json; its contents are not looked at."""
    return os.path.lexists(Path(folder) / COLLECTION_NAME)


def refuse_folder_of_splits(folder: Path) -> None:
    """Raise UsageError, which names the splits, for a folder of splits in the place of one dataset.

    So it does for a collection.
    """
    if is_collection(folder) and not _is_dataset(folder):
        raise UsageError("is a collection: open_collection() opens it, and a Loader takes it", path=folder)
    if splits := splits_of(folder):
        names = " and ".join(filter(None, (", ".join([*splits][:-1]), [*splits][-1])))
        first = next(iter(splits.values()))
        raise UsageError(f"is a folder of splits ({names}): give one of them: {str(first)!r}", path=folder)


def _is_dataset(folder: Path) -> bool:
    return folder.is_dir() and any((folder / mark).exists() for mark in MARKS)
