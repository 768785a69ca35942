"""Values in one piece of memory are read back equal, their arrays as views or as copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from shardprep.loaders.batches.pickling import ALIGNMENT, Pickled, aligned, unpickled

LEAVES = (
    st.none()
    | st.integers()
    | st.binary()
    | st.text()
    | arrays.arrays(st.sampled_from(["u1", "<f4", "S3", "?"]), arrays.array_shapes(min_dims=0, min_side=0))
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def laid_out(value: object, *, copied: bool = False) -> Any:
    piece = Pickled.of(value, copied=copied)
    memory = aligned(piece.size)
    piece.write(memory)
    return memory


@given(VALUES, st.booleans())
def test_any_value_comes_back_as_it_was(value: object, copied: bool) -> None:
    found = unpickled(laid_out(value), copied=copied)

    np.testing.assert_equal(found, value)
    assert type(found) is type(value)


@pytest.mark.slow
@given(VALUES)
def test_a_piece_may_lie_anywhere(value: object) -> None:
    piece = laid_out(value)
    shifted = aligned(piece.size + 1)[1:]
    shifted[:] = piece

    np.testing.assert_equal(unpickled(shifted, copied=True), value)


def test_arrays_lie_in_the_piece_on_64_bytes_and_can_be_written() -> None:
    memory = laid_out((np.arange(7), "x", np.ones((3, 3))))
    first, _, last = unpickled(memory, copied=False)
    first[0] = 9

    assert all(np.shares_memory(array, memory) for array in (first, last))
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in (first, last))
    assert unpickled(memory, copied=False)[0][0] == 9


def test_a_copy_is_its_own() -> None:
    memory = laid_out(np.arange(7))
    copy = unpickled(memory, copied=True)
    memory[:] = 0

    assert copy.tolist() == list(range(7))
    assert copy.flags.writeable


@pytest.mark.parametrize(("copied", "expected"), [(True, 0), (False, 5)])
def test_what_is_not_copied_at_once_is_laid_out_as_it_is_then(copied: bool, expected: int) -> None:
    array = np.zeros(100, np.int64)
    piece = Pickled.of(array, copied=copied)
    array[:] = 5
    memory = aligned(piece.size)
    piece.write(memory)

    assert set(unpickled(memory, copied=False).tolist()) == {expected}
