"""Sources as one pass after the other, and peeking at the first batch."""

from __future__ import annotations

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.passes import Passes


def test_an_empty_source_cannot_be_peeked_at() -> None:
    with pytest.raises(UsageError, match="give a signature"):
        Passes([]).peek()
