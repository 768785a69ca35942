"""The values of a column of JSON in a batch."""

from __future__ import annotations

from typing import Any


class JsonValues(list[Any]):
    """A list of one JSON value for each record. Frames carry it as it is, unlike lists of arrays."""
