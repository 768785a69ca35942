"""A flow as the source of an input: exact passes, in its form, that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Flow
from shardprep.loaders.tf_inputs import BatchQueueInput, Input
from support.flow_functions import named, pair
from support.tf_members import WAYS, WHOLE, Made, assert_same_form, members as members_of

COUNT, SIZE = 23, 5


def batch_queue(items: Flow, **options: Any) -> Input:
    return BatchQueueInput(items, SIZE, **options)


OF_BATCHES: dict[str, Made] = {
    name: WHOLE[name] for name in ("feed", "queue", "staging-2", "staging-over-queue", "dataset")
}
MEMBERS = OF_BATCHES | {"batch-queue": batch_queue}

members = members_of(MEMBERS, quick=("queue", "batch-queue"))
whole_batches = members_of(OF_BATCHES, quick=("dataset",))

numbers = Flow.from_iterable(range(COUNT))
shuffled = numbers.shuffle(9, seed=1)

HERE: dict[str, Callable[[], Flow]] = {
    "tuples": lambda: shuffled.map(pair, random=True),
    "dicts": lambda: shuffled.map(named, random=True),
    "threads": lambda: shuffled.map(pair, random=True, threads=2),
}


def source_for(make: Made, items: Flow) -> Flow:
    """The flow for the input: of batches, or of items for the input that makes batches."""
    return items if make is batch_queue else items.batch(SIZE)


@pytest.mark.slow
@members
def test_two_epochs_are_the_flows_first_two_passes_bit_for_bit(make: Made) -> None:
    for items, way in zip(cycle(HERE.values()), WAYS.values(), strict=False):
        reference = items().batch(SIZE)
        with make(source_for(make, items())) as each:
            assert len(each) == each.batches_per_epoch == 5  # type: ignore[attr-defined]
            whole_epoch = way(each)
            for number in range(2):
                for got, expected in zip(whole_epoch(), reference.at_pass(number), strict=True):
                    assert_same_form(got, expected)


def address_of(tensor: Any) -> int:
    return int(np.frombuffer(memoryview(tensor), np.uint8).ctypes.data)


@whole_batches
def test_batches_that_never_change_are_lent_without_a_copy(make: Made) -> None:
    made: list[int] = []
    flow = (
        shuffled.map(pair, random=True)
        .batch(SIZE)
        .filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    )
    assert flow.batches_never_change

    with make(flow) as each:
        assert [address_of(values) for values, _ in each] == made
