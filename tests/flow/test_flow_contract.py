"""The contract of every step of a flow."""

from __future__ import annotations

import gc
import weakref
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow.node import Node
from shardprep.loaders.flow.passes import PassContext
from support.flow_members import MEMBERS, Items, Member

every_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
HOLDING_NOTHING = [member for member in MEMBERS if not member.holds]
with_and_without_numbers = pytest.mark.parametrize("can_pick", [True, False], ids=["numbers", "no numbers"])


def made(member: Member, **source: Any) -> tuple[Node, Items]:
    items = Items(**source)
    return member.make(items), items


def array_in(item: Any) -> np.ndarray:
    """The first array in an item."""
    while not isinstance(item, np.ndarray):
        item = next(iter(item.values() if isinstance(item, dict) else item))
    return item


def assert_all_ended(source: Items) -> None:
    gc.collect()
    assert sorted(source.begun) == sorted(source.ended)


@every_member
@with_and_without_numbers
def test_a_pass_that_is_over_has_ended_its_source(member: Member, can_pick: bool) -> None:
    node, source = made(member, can_pick=can_pick)
    items = node.run(PassContext())
    for _ in items:
        pass
    assert source.begun
    assert sorted(source.begun) == sorted(source.ended)


@every_member
def test_without_numbers_nothing_is_picked(member: Member) -> None:
    node, _ = made(member, can_pick=False)
    assert not node.can_pick
    with pytest.raises(UsageError, match="by number"):
        list(node.pick(PassContext(), [0]))


@pytest.mark.parametrize("member", HOLDING_NOTHING, ids=lambda member: member.name)
@with_and_without_numbers
def test_nothing_is_held_once_it_was_yielded(member: Member, can_pick: bool) -> None:
    node, _ = made(member, can_pick=can_pick)
    runs = [node.run(PassContext())]
    if node.can_pick:
        runs.append(node.pick(PassContext(), cycle([0, 1])))
    for items in runs:
        for _ in range(4):
            seen = weakref.ref(array_in(next(items)))
            gc.collect()
            assert seen() is None
        end(items)


@every_member
def test_an_endless_source_is_either_refused_or_drawn_from_as_needed(member: Member) -> None:
    source = Items(count=None, can_pick=False)
    try:
        node = member.make(source)
    except UsageError:
        return
    items = node.run(PassContext())
    assert len(list(islice(items, 3))) > 0
    end(items)
    assert node.length.is_exact or node.length.count == float("inf")
    assert_all_ended(source)
