"""A lease's spare bytes: payloads made in their room stay there, unused ones take no space."""

from __future__ import annotations

import numpy as np
import pytest

from shardprep.loaders.batches.pickling import ALIGNMENT, aligned
from shardprep.loaders.batches.slots import Memory
from shardprep.loaders.engine.messages import LeaseOutcomes, OutcomeWriter, Skipped


@pytest.fixture
def spare() -> Memory:
    memory = aligned(8 * ALIGNMENT)
    memory[:] = 255
    return memory


def unpacked(packer: OutcomeWriter, spare: Memory) -> dict[int, object]:
    part = LeaseOutcomes(0, packer.rows, memoryview(b"".join(packer.parts())))
    return dict(part.unpack(spare))


def test_what_is_made_in_its_room_is_delivered_from_there(spare: Memory) -> None:
    packer = OutcomeWriter(spare)
    for row in range(3):
        made = packer.room(100)
        made[:] = row
        packer.add(made)
        assert made.ctypes.data == spare.ctypes.data + row * 2 * ALIGNMENT

    delivered = unpacked(packer, spare)
    spare[:] = 9

    assert [bytes(delivered[row]) for row in range(3)] == [b"\11" * 100] * 3  # type: ignore[call-overload]


def test_room_that_is_not_yielded_is_not_used_up(spare: Memory) -> None:
    packer = OutcomeWriter(spare)
    for outcome in (None, Skipped("x"), None):
        assert packer.room(7 * ALIGNMENT).base is not None
        packer.add(outcome)
    last = packer.room(7 * ALIGNMENT)
    last[:] = 1
    packer.add(last)

    assert last.ctypes.data == spare.ctypes.data + ALIGNMENT  # behind the reason
    assert unpacked(packer, spare) == {1: Skipped("x"), 3: memoryview(b"\1" * 7 * ALIGNMENT)}


def test_room_beyond_the_spare_bytes_is_memory_of_its_own_and_travels(spare: Memory) -> None:
    packer = OutcomeWriter(spare)
    made = packer.room(spare.size + 1)
    made[:] = 3
    packer.add(made)
    made[:] = 4  # it was copied when it was added

    assert unpacked(packer, spare) == {0: memoryview(b"\3" * made.size)}
    assert (spare == 255).all()


def test_room_of_a_row_before_is_an_array_like_any_other(spare: Memory) -> None:
    packer = OutcomeWriter(spare)
    old = packer.room(5)
    packer.add(None)
    old[:] = 6
    packer.add(old)

    (array,) = unpacked(packer, spare).values()
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [6] * 5
