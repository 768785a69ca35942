"""Several flows as one: concatenated, zipped and mixed."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.flow.combine import (
    Choose,
    Mix,
)
from shardprep.loaders.flow.node import INFINITE, UNKNOWN, at_most, exact
from support.flow_members import Items

counts = st.lists(st.integers(0, 12), min_size=1, max_size=4)
weights = st.floats(1e-3, 1e3)


def flows_of(counts: list[int]) -> list[Flow]:
    """Items are (flow, number)."""
    return [Flow.from_iterable([(n, item) for item in range(count)]) for n, count in enumerate(counts)]


def test_nothing_comes_after_an_endless_flow() -> None:
    endless = Flow.from_iterable([1]).repeat()
    with pytest.raises(UsageError, match="never reached"):
        endless.concat(Flow.from_iterable([2]))
    assert list(islice(Flow.from_iterable([2]).concat(endless), 3)) == [2, 1, 1]


def test_the_choices_stay_what_they_are() -> None:
    first, second = flows_of([6, 4])
    mixed = [n for n, _ in first.mix(second, seed=5).at_pass(1)]
    chosen = [n for n, _ in first.choose(second, weights=[2, 1], seed=5).at_pass(1)]
    assert mixed == [1, 1, 0, 1, 1, 0, 0, 0, 0, 0]
    assert chosen == [1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("flows", "chosen", "length"),
    [
        ([3, 4], None, at_most(7)),
        ([3, None], None, UNKNOWN),
        ([None, None], None, INFINITE),
        ([3, None], [0, 1], INFINITE),
        ([3, None], [1, 0], exact(3)),
        ([3], None, exact(3)),
    ],
    ids=str,
)
def test_how_many_are_chosen_is_said_as_far_as_it_is_known(flows: Any, chosen: Any, length: Any) -> None:
    nodes = tuple(Items(count) for count in flows)
    assert Choose(nodes, chosen, 0).length == length


def test_a_flow_of_weight_0_cannot_come_whole() -> None:
    with pytest.raises(UsageError, match="never drawn"):
        Mix((Items(), Items()), (1, 0), 0)
