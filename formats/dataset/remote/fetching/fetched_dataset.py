"""What is known of a dataset that was fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.dataset.manifest import Manifest


@dataclass(frozen=True)
class FetchedDataset:
    """One fetched dataset.

    ``path`` is its folder, ``url`` the place that it was fetched from, and ``manifest`` its manifest.
    ``fetched`` are the names of the files that were downloaded, and ``kept`` of those that were there and
    right. ``complete`` is whether all files of the dataset are there, and the manifest with them.
    """

    path: Path
    url: str
    manifest: Manifest
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    complete: bool
