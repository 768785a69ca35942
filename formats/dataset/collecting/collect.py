"""The making of a collection: a file that lists finished datasets under one root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardprep.formats.dataset.manifest import COLLECTION_NAME, Manifest, read_manifest
from shardprep.formats.dataset.splits import is_collection, refuse_folder_of_splits
from shardprep.formats.errors import UsageError
from shardprep.formats.system.atomic_write import publish_bytes
from shardprep.formats.system.user_path import user_path

from .agreement import differences
from .collection import Collection, open_collection
from .collection_file import MAX_PARTS, CollectionFile, PartEntry


def collect(out: str | os.PathLike[str], parts: Iterable[str | os.PathLike[str]]) -> Collection:
    """Make the folder ``out`` with a collection of the finished datasets ``parts``, and open it.

    The folder gets one file, ``collection.json``; nothing is copied. A part is named by the end of its path,
    of as many names as make it unique. Parts below or beside ``out`` are found by a relative path, and may be
    moved with it; others by their absolute path. A collection that is there is replaced only by an equal one.

    Raises UsageError where the parts do not agree in classes, columns, or whether they have images, for a
    part that is given twice, for no part, and where ``out`` has another collection or a dataset; and
    ManifestDamaged, UnknownVersion, OSError.
    """
    folder = user_path(out)
    folders = [user_path(part) for part in parts]
    found = CollectionFile(tuple(_entries(folder, folders)))
    _refuse_another(folder, found)
    folder.mkdir(parents=True, exist_ok=True)
    publish_bytes(folder / COLLECTION_NAME, found.to_bytes(), folder)
    return open_collection(folder)


def _entries(out: Path, folders: Sequence[Path]) -> Iterable[PartEntry]:
    if not 0 < len(folders) <= MAX_PARTS:
        raise UsageError(f"a collection has 1 to {MAX_PARTS} parts, not {len(folders)}")
    names, manifests = _names_of(folders), [_manifest(folder) for folder in folders]
    roots = [manifest.root for manifest in manifests]
    for name, root in zip(names, roots, strict=True):
        if roots.count(root) > 1:
            raise UsageError(f"{name} is given twice, or is equal to another part: its root is {root}")
    if found := differences(names, manifests):
        raise UsageError(found)
    return map(PartEntry.of, names, (_place(folder, out) for folder in folders), manifests)


def _manifest(folder: Path) -> Manifest:
    if is_collection(folder):
        raise UsageError("is a collection; give its parts", path=folder)
    refuse_folder_of_splits(folder)
    return read_manifest(folder)


def _names_of(folders: Sequence[Path]) -> list[str]:
    """Return the ends of the paths, as long as makes them unique. Raises UsageError for equal paths."""
    whole = [folder.absolute().parts[1:] for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise UsageError("a part is given twice")


def _place(folder: Path, out: Path) -> str:
    """Return the path by which a part is listed: relative below or beside the collection, else absolute."""
    part, here = folder.resolve(), out.resolve()
    return os.path.relpath(part, here) if here.parent in part.parents else str(part)


def _refuse_another(folder: Path, wanted: CollectionFile) -> None:
    if (folder / "manifest.json").exists():
        raise UsageError("has a dataset; make the collection in another folder", path=folder)
    if is_collection(folder) and (folder / COLLECTION_NAME).read_bytes() != wanted.to_bytes():
        raise UsageError("has another collection; name another folder, or remove it first", path=folder)
