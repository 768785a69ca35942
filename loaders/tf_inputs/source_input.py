"""Inputs whose batches come from a source in Python."""

from __future__ import annotations

from typing import Any

from ..passes import Passes
from .input import Input


class SourceInput(Input):
    """An input over the passes of a source: its epochs are as long as these."""

    def __init__(self, passes: Passes, element_spec: Any) -> None:
        self._passes = passes
        self.element_spec = element_spec

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def batches_per_epoch(self) -> int | None:
        """How many batches every epoch has; None where that is unknown."""
        return self._passes.steady_length
