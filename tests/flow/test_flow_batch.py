"""Batches of items, and the rows of batches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from flow_members import Items
from hypothesis import given
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.core.length import Length, exact
from shardprep.loaders.flow.core.node import BatchingSource, Node
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.steps.batch import Batch, Remainder

REMAINDERS: tuple[Remainder, ...] = ("keep", "drop", "pad")

counts, sizes, remainders = st.integers(0, 30), st.integers(1, 12), st.sampled_from(REMAINDERS)


def numbers_in(count: int, size: int, remainder: str) -> list[list[int]]:
    """The numbers of the items in each batch."""
    groups = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    return [group for group in groups if len(group) == size or remainder != "drop"]


@given(count=counts, size=sizes, remainder=remainders)
def test_batches_are_the_items_in_order(count: int, size: int, remainder: Remainder) -> None:
    flow = Flow(Items(count)).batch(size, remainder=remainder)
    batches, expected = list(flow), numbers_in(count, size, remainder)

    assert len(batches) == len(flow) == len(expected)
    for batch, numbers in zip(batches, expected, strict=True):
        rows = len(numbers)
        arrays, labels = batch[:2]
        assert (arrays.dtype, labels.dtype) == (np.float32, np.int64)
        assert arrays[:rows].tolist() == [[n, n] for n in numbers]
        assert labels[:rows].tolist() == numbers
        if remainder == "pad":
            assert arrays.shape == (size, 2)
            assert not arrays[rows:].any()
            assert not labels[rows:].any()
            assert batch[2].tolist() == [True] * rows + [False] * (size - rows)
        else:
            assert len(batch) == 2
            assert arrays.shape == (rows, 2)
        for part in batch:
            assert part.ctypes.data % 64 == 0
            assert part.flags.writeable


@given(count=st.integers(1, 30), size=sizes, remainder=remainders, data=st.data())
def test_picked_batches_are_those_of_the_pass(
    count: int, size: int, remainder: Remainder, data: st.DataObject
) -> None:
    flow = Flow(Items(count)).map(lambda item, rng: (item, rng.random()), random=True)
    flow = flow.batch(size, remainder=remainder)
    whole = list(flow.at_pass(1))
    asked = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)) if whole else []

    for found, number in zip(flow.pick(1, iter(asked)), asked, strict=True):
        np.testing.assert_equal(found, whole[number])


def test_a_batch_that_is_not_there_cannot_be_picked() -> None:
    flow = Flow(Items(10)).batch(4, remainder="drop")
    for number in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            list(flow.pick(0, [number]))


@given(count=counts, size=sizes)
def test_unbatching_undoes_batching(count: int, size: int) -> None:
    whole = list(Flow(Items(count)))
    for as_list in (False, True):
        rows = list(Flow(Items(count)).batch(size, as_list=as_list).unbatch())
        np.testing.assert_equal(rows, whole)


def test_a_mask_is_added_to_every_form() -> None:
    arrays = Flow.from_iterable([1.5, 2.5, 3.5])
    (_, (array, mask)) = arrays.batch(2, remainder="pad")
    assert (array.tolist(), mask.tolist()) == ([3.5, 0], [True, False])

    nested = arrays.map(lambda x: {"x": x, "more": (x, [x, x])})
    first, second = nested.batch(2, remainder="pad")
    assert first["mask"].tolist() == [True, True]
    assert second["mask"].dtype == bool
    assert second["more"][1][0].tolist() == [3.5, 0]
    assert [row["mask"] for row in nested.batch(2, remainder="pad").unbatch()] == [True, True, True, False]


def test_a_mask_name_that_is_taken_is_an_error() -> None:
    with pytest.raises(UsageError, match="named mask"):
        list(Flow.from_iterable([{"mask": 1}]).batch(1, remainder="pad"))


def test_python_numbers_have_dtypes_of_their_own() -> None:
    ((flags, integers, floats),) = Flow.from_iterable([(True, 1 << 40, 0.5)]).batch(1)

    assert [part.dtype for part in (flags, integers, floats)] == [bool, np.int64, np.float64]
    assert integers[0] == 1 << 40


def test_lists_keep_items_of_any_form() -> None:
    items: list[Any] = [(b"a", None, [1]), (b"bcd", "x", [2, 3]), (bytearray(b"e"), 3, [])]
    source = Flow.from_iterable(items)

    assert list(source.batch(2, as_list=True)) == [
        ([b"a", b"bcd"], [None, "x"], [[1], [2, 3]]),
        ([b"e"], [3], [[]]),
    ]
    assert list(source.select(0).map(lambda parts: parts[0]).batch(3, as_list=True)) == [[b"a", b"bcd", b"e"]]
    assert list(Flow.from_iterable([{"a": 1}, {"a": "b"}]).batch(2, as_list=True)) == [{"a": [1, "b"]}]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(1, 2), (1,)], "numbers of parts"),
        ([{"a": 1}, {"b": 1}], "names"),
        ([(1,), {"a": 1}], "forms"),
        ([(1,), 1], "forms"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_items_of_different_forms_are_an_error_with_the_batchs_number(
    items: list[Any], message: str, as_list: bool
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        list(Flow.from_iterable([items[0]] * 4 + items).batch(2, as_list=as_list))
    assert raised.value.__notes__ == ["In item 2 of pass 0, at batch(2)"]


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": -1},
        {"size": 2.0},
        {"size": True},
        {"size": 2, "remainder": "cut"},
        {"size": 2, "remainder": "pad", "as_list": True},
    ],
    ids=str,
)
def test_invalid_batch_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Flow.from_iterable([1]).batch(**options)


def test_lengths_are_as_exact_as_the_items() -> None:
    source = Flow(Items(10))
    lengths = [source.batch(4, remainder=remainder).length.items for remainder in REMAINDERS]
    assert lengths == [3, 2, 3]
    assert str(source.filter(bool).batch(4).length) == "at most 3"
    assert str(source.repeat().batch(4).length) == "infinite"
    assert str(source.batch_by_shape(4).length) == "at most 10"
    assert str(source.batch_by_shape(4, remainder="drop").length) == "at most 2"
    assert str(source.batch(4).unbatch().length) == "unknown"
    assert str(source.repeat().batch(4).unbatch().length) == "infinite"


def test_no_item_is_held_while_its_batch_is_out() -> None:
    seen: list[weakref.ref[np.ndarray]] = []

    def noting(item: Any) -> Any:
        seen.append(weakref.ref(item[0]))
        return item

    source = Flow(Items(6)).map(noting)
    for flow in (source.batch(3), source.batch(3, remainder="pad"), source.batch_by_shape(3)):
        seen.clear()
        batches = iter(flow)
        next(batches)
        assert [ref() for ref in seen] == [None] * 3


# Batches that the source makes


@dataclass(frozen=True)
class Made(Node, BatchingSource):
    """``count`` numbers, one by one or in batches."""

    count: int
    can_batch: bool = True  # type: ignore[misc]

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @property
    def length(self) -> Length:
        return exact(self.count)

    def run(self, now: PassContext) -> Iterator[Any]:
        yield from range(self.count)

    def batches(self, now: PassContext, size: int, *, least: int) -> Iterator[Any]:
        for start in range(0, self.count - least + 1, size):
            yield np.arange(start, min(start + size, self.count)) + 1000


@given(count=counts, size=sizes, remainder=remainders)
def test_batches_that_the_source_makes_are_taken_as_they_are(
    count: int, size: int, remainder: Remainder
) -> None:
    batches = list(Batch.of(Made(count), size, remainder=remainder, as_list=False).run(PassContext()))
    expected = numbers_in(count, size, remainder)

    assert len(batches) == len(expected)
    for batch, numbers in zip(batches, expected, strict=True):
        array, mask = batch if remainder == "pad" else (batch, np.full(len(batch), True))
        assert mask.sum() == len(numbers)
        assert (array[mask] - 1000).tolist() == numbers
        assert not array[~mask].any()


def test_lists_are_not_made_by_the_source_nor_what_it_cannot_make() -> None:
    lists = Batch.of(Made(3), 2, remainder="keep", as_list=True)
    arrays = Batch.of(Made(3, can_batch=False), 2, remainder="keep", as_list=False)

    assert list(lists.run(PassContext())) == [[0, 1], [2]]
    assert [array.tolist() for array in arrays.run(PassContext())] == [[0, 1], [2]]


# By shape


@given(widths=st.lists(st.integers(1, 4), max_size=40), size=st.integers(1, 5), keep=st.booleans())
def test_items_of_each_shape_wait_for_each_other(widths: list[int], size: int, keep: bool) -> None:
    waiting: dict[int, list[int]] = {}
    expected = []
    for number, width in enumerate(widths):
        waiting.setdefault(width, []).append(number)
        if len(waiting[width]) == size:
            expected.append(waiting.pop(width))
    if keep:
        expected += sorted(waiting.values())

    flow = Flow.from_iterable([{"n": n, "x": np.zeros(width)} for n, width in enumerate(widths)])
    batches = list(flow.batch_by_shape(size, remainder="keep" if keep else "drop"))

    assert [batch["n"].tolist() for batch in batches] == expected


def test_shapes_are_those_of_all_components() -> None:
    items = [
        (np.zeros(2), 0),
        (np.zeros(2), [0]),
        (np.zeros((2, 1)), 0),
        (np.zeros(2), 0),
        (np.zeros(2), [1]),
    ]
    batches = list(Flow.from_iterable(items).batch_by_shape(2))
    assert [len(batch[0]) for batch in batches] == [2, 2, 1]


def test_items_of_one_shape_that_do_not_go_together_are_an_error() -> None:
    with pytest.raises(UsageError, match="dtypes") as raised:
        list(Flow.from_iterable([*np.zeros((3, 2)), np.zeros(2, int)]).batch_by_shape(2))
    assert raised.value.__notes__ == ["In item 1 of pass 0, at batch_by_shape(2)"]


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 2, "remainder": "pad"}], ids=str)
def test_invalid_options_of_batches_by_shape_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Flow.from_iterable([1]).batch_by_shape(**options)


# Rows


def test_rows_are_views_of_their_batch() -> None:
    batch = {"x": np.arange(6).reshape(3, 2), "y": ([b"a", b"b", b"c"], np.arange(3))}
    rows = list(Flow.from_iterable([batch]).unbatch())

    assert [row["x"].tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert [row["y"] for row in rows] == [(b"a", 0), (b"b", 1), (b"c", 2)]
    assert all(np.shares_memory(row["x"], batch["x"]) for row in rows)


@pytest.mark.parametrize(
    "batch",
    [3, np.float32(1), np.array(1), b"abc", (), (np.zeros(2), np.zeros(3)), {"a": [1], "b": "x"}, None],
    ids=str,
)
def test_a_batch_without_rows_is_an_error_with_its_number(batch: Any) -> None:
    with pytest.raises(UsageError, match="batch") as raised:
        list(Flow.from_iterable([np.zeros(2), batch]).unbatch())
    assert raised.value.__notes__ == ["In item 1 of pass 0, at unbatch"]


def test_only_as_many_items_are_drawn_as_the_batches_need() -> None:
    drawn: list[int] = []
    flow = Flow(Items(None)).map(lambda item: (drawn.append(item[1]), item)[1])
    next(iter(flow.batch(5)))
    assert drawn == [0, 1, 2, 3, 4]
    assert len(list(islice(flow.batch(5).unbatch(), 7))) == 7
