"""Batches of records: shapes, dtypes, alignment, remainders, and records of different form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.stack import Batches, stack

DTYPES = st.sampled_from(["u1", "i2", "<i4", "i8", "f2", "f4", "f8", "c8", "c16", "?"])


@given(
    count=st.integers(0, 30),
    size=st.integers(1, 12),
    keep=st.booleans(),
    array=DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=4))),
)
def test_batches_are_the_records_in_order(count: int, size: int, keep: bool, array: np.ndarray) -> None:
    records = [(array, number) for number in range(count)]
    batches = Batches(records, size, remainder="keep" if keep else "drop")
    got = list(batches)

    assert len(got) == len(batches)
    expected = list(range(count)) if keep else list(range(count - count % size))
    assert [int(n) for _, numbers in got for n in numbers] == expected
    assert [len(numbers) for _, numbers in got[:-1]] == [size] * (len(got) - 1)
    for values, numbers in got:
        assert values.dtype == array.dtype
        assert values.shape == (len(numbers), *array.shape)
        for row in values:
            np.testing.assert_array_equal(row, array)


@given(shape=hnp.array_shapes(max_dims=3, max_side=9), rows=st.integers(1, 9), dtype=DTYPES)
def test_every_array_is_fresh_contiguous_and_on_64_bytes(
    shape: tuple[int, ...], rows: int, dtype: str
) -> None:
    record = np.zeros(shape, dtype)
    batch = stack([record] * rows)

    assert batch.ctypes.data % 64 == 0
    assert batch.flags.c_contiguous
    assert batch.flags.writeable
    assert not np.shares_memory(batch, record)


def test_forms_are_kept() -> None:
    records = [{"x": np.full(2, n), "y": (n, [np.float32(n), True])} for n in range(3)]

    batch = stack(records)

    assert batch.keys() == {"x", "y"}
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["y"][0].tolist() == [0, 1, 2]
    assert batch["y"][1][0].dtype == np.float32
    assert batch["y"][1][1].tolist() == [True] * 3


def test_fortran_and_readonly_records_are_stacked() -> None:
    record = np.asfortranarray(np.arange(12).reshape(3, 4))
    record.flags.writeable = False
    np.testing.assert_array_equal(stack([record, record]), np.stack([record, record]))


WRONG: dict[str, tuple[list[Any], str]] = {
    "shapes": ([np.zeros(2), np.zeros(3)], r"shapes: .*\(2,\).*\(3,\)"),
    "dtypes": ([np.zeros(2), np.zeros(2, np.float32)], "dtypes: .*<f4.*<f8"),
    "orders": ([np.zeros(2, "<i4"), np.zeros(2, ">i4")], "dtypes"),
    "forms": ([(1, 2), {"x": 1}], "forms: .*dict.*tuple"),
    "array and tuple": ([np.zeros(2), (1, 2)], "forms: .*ndarray.*tuple"),
    "names": ([{"x": 1}, {"y": 1}], "names"),
    "lengths": ([(1, 2), (1, 2, 3)], "numbers of parts: .*2.*3"),
    "strings": (["a", "b"], "cannot be stacked"),
    "bytes": ([b"a", b"b"], "cannot be stacked"),
    "objects": ([None, None], "cannot be stacked"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_do_not_fit_together_are_an_error(wrong: str) -> None:
    records, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        list(Batches(records, 2))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": -1}, {"remainder": "pad"}])
def test_what_cannot_be_meant_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_size"):
        Batches([1], **({"batch_size": 2} | options))


def test_an_error_of_the_source_comes_after_the_batches_before_it() -> None:
    def records() -> Iterator[int]:
        yield from range(5)
        raise KeyError("no")

    batches = iter(Batches(records, 2))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError):
        next(batches)


def test_leaving_early_ends_the_sources_pass_and_the_next_is_whole() -> None:
    ended = []

    def records() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            ended.append(True)

    batches = Batches(records, 2)
    iterator = iter(batches)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]

    assert ended == [True]
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_the_length_of_a_function_is_unknown() -> None:
    with pytest.raises(TypeError):
        len(Batches(lambda: [1], 2))
