"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from shardprep.loaders.flow.flow import Flow
    from shardprep.loaders.flow.node import Length
    from shardprep.loaders.flow.stats import FlowStats

__all__ = [
    "Flow",
    "FlowStats",
    "Length",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "shardprep.loaders.flow.flow": ["Flow"],
            "shardprep.loaders.flow.node": ["Length"],
            "shardprep.loaders.flow.stats": ["FlowStats"],
        },
    )
