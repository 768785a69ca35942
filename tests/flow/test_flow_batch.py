"""Batches of items, and the rows of batches."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.steps import Remainder
from support.flow_members import Items

REMAINDERS: tuple[Remainder, ...] = ("keep", "drop", "pad")


def test_a_mask_name_that_is_taken_is_an_error() -> None:
    with pytest.raises(UsageError, match="named mask"):
        list(Flow.from_iterable([{"mask": 1}]).batch(1, remainder="pad"))


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


def test_a_masked_array_is_refused_and_kept_in_lists() -> None:
    items = Flow.from_iterable([np.ma.array([1, 2], mask=[False, True])])
    with pytest.raises(UsageError, match=r"lose its mask .*: give filled"):
        list(items.batch(1))

    assert np.ma.getmaskarray(next(iter(items.batch(1, as_list=True)))[0]).tolist() == [False, True]


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


# By shape


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


@pytest.mark.parametrize(
    ("items", "as_list", "value", "message"),
    [
        ([np.zeros(2)], False, 0, "add as_list=True"),
        ([np.zeros(2), np.zeros((2, 2))], True, 0, "different numbers of dimensions"),
        ([np.zeros(2), np.zeros(2, np.int8)], True, 0, "different dtypes"),
        ([np.zeros(2, np.uint8), np.zeros(3, np.uint8)], True, -1, "uint8 does not hold that value"),
        ([np.zeros(2, np.int64), np.zeros(1, np.int64)], True, 0.5, "int64 does not hold that value"),
        (
            [np.zeros(2, np.int64), np.zeros(1, np.int64)],
            True,
            float("nan"),
            "int64 does not hold that value",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused(
    items: list[Any], as_list: bool, value: float, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        list(Flow.from_iterable(items).batch(2, as_list=as_list).pad(value))
