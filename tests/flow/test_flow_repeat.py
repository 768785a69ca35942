"""Repeated passes, and passes that are cut short."""

from __future__ import annotations

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow


def test_so_it_is_in_a_later_pass() -> None:
    passes = iter([[1, 2], []])
    items = iter(Flow.from_callable(lambda: next(passes)).repeat())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(UsageError, match="pass 1 of a flow that is repeated without end had no items"):
        next(items)
