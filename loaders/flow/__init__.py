"""Flow: any Python data, composed into a pipeline."""

from shardprep.loaders.flow.core.length import Length

from .flow import Flow
from .stats import FlowStats

__all__ = ["Flow", "FlowStats", "Length"]
