"""A flow from parts: one item of each in turn, in every pass, and nothing is left open."""

from __future__ import annotations

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow


def test_a_part_without_items_is_an_error() -> None:
    with pytest.raises(UsageError, match="returned a int, which has no items"):
        list(Flow.from_parts(lambda part: 3, parts=1))  # type: ignore[arg-type,return-value]


def test_a_part_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="part 2 of a flow of 2"):
        Flow.from_parts(range, parts=2).part(0, 2)
