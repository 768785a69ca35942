"""Measuring loaders, flows and disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from shardprep.loaders.measuring.bench import measure
    from shardprep.loaders.measuring.progress_bar import tracing, watched

__all__ = [
    "measure",
    "tracing",
    "watched",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "shardprep.loaders.measuring.bench": ["measure"],
            "shardprep.loaders.measuring.progress_bar": ["tracing", "watched"],
        },
    )
