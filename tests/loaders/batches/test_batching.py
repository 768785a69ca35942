"""Batches of records that fit together or not, and the slots of shared memory that they lie in."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.batches.passes import Passes
from shardprep.loaders.batches.pickling import ALIGNMENT, MIN_RECYCLED_BYTES, MemoryPool
from shardprep.loaders.batches.slots import SlotLayout, SlotRing, SlotsHeld
from shardprep.loaders.batches.stack import stack
from shardprep.loaders.engine.dispatcher import Bell
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.transforms.contract import ArraySpec
from support.file_changes import files_of_at_most

WRONG: dict[str, tuple[list[Any], str]] = {
    "shapes": ([np.zeros(2), np.zeros(3)], r"shapes: \(2,\) and \(3,\); .*as_list=True"),
    "dtypes": ([np.zeros(2), np.zeros(2, np.float32)], "dtypes: float32 and float64"),
    "orders": ([np.zeros(2, "<i4"), np.zeros(2, ">i4")], "dtypes"),
    "forms": ([(1, 2), {"x": 1}], "forms: .*dict.*tuple"),
    "array and tuple": ([np.zeros(2), (1, 2)], "forms: .*ndarray.*tuple"),
    "names": ([{"x": 1}, {"y": 1, "x": 1}], "names: x and x, y"),
    "lengths": ([(1, 2), (1, 2, 3)], "numbers of parts: 2 and 3; .*each list that is one part into an array"),
    "strings": (["a", "b"], "cannot be stacked"),
    "bytes": ([b"a", b"bc"], "bytes cannot be stacked; decode"),
    "objects": ([None, None], "cannot be stacked"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_do_not_fit_together_are_an_error(wrong: str) -> None:
    records, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        stack(records)


def test_an_empty_source_cannot_be_peeked_at() -> None:
    with pytest.raises(UsageError, match="give a signature"):
        Passes([]).peek()


def test_a_refused_state_does_not_use_up_a_pass_of_which_the_first_batch_was_seen() -> None:
    flow = Flow.from_iterable(range(3))
    passes = Passes(flow)
    assert passes.peek() == 0
    with pytest.raises(UsageError, match="not the state of a flow"):
        passes.load_state({})
    assert (list(passes.begin()), flow.state_dict()["pass"]) == ([0, 1, 2], 1)


def ring_of(count: int) -> SlotRing:
    return SlotRing(SlotLayout(4, (ArraySpec("a", (3,), "int64"), ArraySpec("b", (), "uint8"))), count)


def test_a_slot_returns_when_the_last_view_of_its_arrays_is_dropped() -> None:
    ring, bell = ring_of(2), Bell()
    arrays = ring.layout.arrays(ring.lend(1, bell.watch), 4)

    row = arrays["a"][2:]
    arrays.clear()
    view = memoryview(row)
    del row
    assert not ring.collect_returned()
    del view

    assert ring.collect_returned() == [1]
    bell.silence()  # raises BlockingIOError for a bell that has not rung


def test_arrays_stay_readable_after_the_ring_is_closed_and_gone() -> None:
    ring = ring_of(2)
    held = ring.layout.arrays(ring.lend(0, weakref.ref), 4)["a"]
    held[:] = 7

    ring.close()
    ring.close()
    del ring
    gc.collect()

    assert (held == 7).all()


def test_holding_more_than_the_ring_allows_gives_one_warning() -> None:
    ring = ring_of(4)
    held = [ring.lend(slot, weakref.ref) for slot in range(4)]

    assert ring.may_keep(held[0])
    assert ring.may_keep(held[1])
    with pytest.warns(SlotsHeld, match="raise `slots`"):
        assert not ring.may_keep(held[2])
    assert not ring.may_keep(held[3])

    assert ring.copied == 2
    del held[0]
    assert ring.may_keep(held[0])


def test_memory_that_the_system_refuses_is_an_error_that_says_what_to_lower() -> None:
    large = SlotLayout(4, (ArraySpec("a", (1 << 20,), "uint8"),))
    with files_of_at_most(1 << 16), pytest.raises(OperationError, match=r"ulimit -f.*batch_size"):
        SlotRing(large, 4)


def test_memory_comes_back_when_it_is_dropped() -> None:
    recycled = MemoryPool()
    first = recycled(MIN_RECYCLED_BYTES)
    where = first.ctypes.data
    assert where % ALIGNMENT == 0
    assert first.flags.writeable
    del first

    assert recycled(MIN_RECYCLED_BYTES).ctypes.data == where
