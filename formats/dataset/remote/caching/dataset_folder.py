"""The folder in a cache that looks like a dataset: its manifest, and links to the files that are there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.system.atomic_write import publish_bytes, unfinished

from .cache_folder import CacheFolder
from .eviction import hex_of


def folder_of(cache: CacheFolder, root: str) -> Path:
    """Return the path of the folder of the dataset with that root."""
    return cache.datasets / root.removeprefix("sha256:")


def known_dataset(cache: CacheFolder, root: str) -> Manifest | None:
    """Return the manifest of a dataset that was opened before, None if it is not known. Raises OSError."""
    try:
        manifest = read_manifest(folder_of(cache, root))
    except (FileNotFoundError, ManifestDamaged):
        return None
    return manifest if manifest.root == root else None


def publish_folder(cache: CacheFolder, manifest: Manifest, data: bytes) -> None:
    """Make the folder of a dataset unless it is there; the manifest comes last. Raises OSError."""
    folder = folder_of(cache, manifest.root)
    with cache.turn():
        if known_dataset(cache, manifest.root) is not None:
            return
        folder.mkdir(exist_ok=True)
        for entry in manifest.files:
            _link(folder / entry.name, _target(cache, folder, entry))
        publish_bytes(folder / MANIFEST_NAME, data, folder)


def _target(cache: CacheFolder, folder: Path, entry: FileEntry) -> str:
    """Return where a link leads: within the cache, which may be moved as a whole."""
    return os.path.relpath(cache.path_of(hex_of(entry)), folder)


def _link(path: Path, target: str) -> None:
    with suppress(OSError):
        if str(path.readlink()) == target:
            return
    new = unfinished(path.parent, path.name)
    new.symlink_to(target)
    new.replace(path)
