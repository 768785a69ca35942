"""What is known of a dataset that was published."""

from __future__ import annotations

from dataclasses import dataclass

from shardprep.formats.dataset.manifest import Manifest


@dataclass(frozen=True)
class PublishedDataset:
    """One published dataset.

    ``url`` is its place, and ``manifest`` its manifest. ``uploaded`` are the names of the files that were
    uploaded, and ``kept`` of those that were there and right. ``already_complete`` is whether the manifest
    was there before.
    """

    url: str
    manifest: Manifest
    uploaded: tuple[str, ...]
    kept: tuple[str, ...]
    already_complete: bool
