"""Batches of items, and the rows of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow


def test_a_mask_name_that_is_taken_is_an_error() -> None:
    with pytest.raises(UsageError, match="named mask"):
        list(Flow.from_iterable([{"mask": 1}]).batch(1, remainder="pad"))


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


# By shape


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
