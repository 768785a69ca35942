"""Flow: any Python data, composed into a pipeline."""

from .flow import Flow
from .length import Length

__all__ = ["Flow", "Length"]
