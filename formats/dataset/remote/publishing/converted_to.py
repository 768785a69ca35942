"""What is known of a split that was converted into object storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardprep.formats.conversion.skipped import SkippedImages
from shardprep.formats.dataset.manifest import Manifest


@dataclass(frozen=True)
class ConvertedTo:
    """One split that was converted into object storage.

    ``url`` is its place; ``manifest``, ``already_complete``, ``skipped`` and ``ignored`` are as in
    :class:`Converted`.
    """

    url: str
    manifest: Manifest
    already_complete: bool
    skipped: SkippedImages = field(default_factory=SkippedImages)
    ignored: Mapping[str, int] = field(default_factory=dict)
