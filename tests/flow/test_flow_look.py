"""The output of ``print``, which changes no item."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.steps import describe
from support.flow_members import Items


class Point(NamedTuple):
    x: int
    y: np.ndarray


class Broken:
    """An object of which every method raises."""

    def __repr__(self) -> str:
        raise ValueError

    __str__ = __hash__ = __len__ = __repr__  # type: ignore[assignment]


class BrokenDict(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no")


LOOKS: dict[str, tuple[Any, str]] = {
    "nested": (
        (
            np.array([[3, 250]], np.uint8),
            {"label": 12345, "key": "secret", "raw": b"secret", "more": [None, 0.5]},
        ),
        "tuple of 2\n"
        "  0: ndarray uint8 [1, 2], 3 to 250\n"
        "  1: dict of 4\n"
        "    label: int\n"
        "    key: str of 6 characters\n"
        "    raw: bytes of 6 bytes\n"
        "    more: list of 2\n"
        "      0: NoneType\n"
        "      1: float",
    ),
    "named tuple": (Point(1, np.zeros(0)), "Point of 2\n  0: int\n  1: ndarray float64 [0]"),
    "not a number": (np.array([1, np.nan]), "ndarray float64 [2], nan to nan"),
    "no range": (np.array(["secret"]), "ndarray <U6 [1]"),
    "no axis": (np.array(7), "ndarray int64 [], 7 to 7"),
    "numpy's number": (np.float32(3), "float32"),
    "memory": (memoryview(np.zeros((2, 3))), "memoryview of 48 bytes"),
    "broken": (Broken(), "Broken"),
    "within": ([Broken()], "list of 1\n  0: Broken"),
    "raises": (BrokenDict(a=1), "BrokenDict, which cannot be described: RuntimeError"),
    "other dict": (OrderedDict(a=1), "OrderedDict of 1\n  a: int"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_types_shapes_and_ranges_are_shown_and_never_the_data(name: str) -> None:
    item, expected = LOOKS[name]
    assert describe(item) == expected


def test_long_and_deep_items_are_cut() -> None:
    endless: list[Any] = []
    endless.append(endless)

    assert describe(list(range(1000))).splitlines()[-1] == "  ..."
    assert len(describe(list(range(1000))).splitlines()) < 20
    assert describe(endless).endswith("...")


def test_the_first_items_of_each_pass_are_printed_with_their_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flow = Flow.from_iterable([10, 20, 30]).print(2)

    assert list(flow) == [10, 20, 30]
    assert list(flow) == [10, 20, 30]
    assert list(flow.pick(7, [2, 0, 1])) == [30, 10, 20]

    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == [
        "Item 0 of pass 0",
        "Item 1 of pass 0",
        "Item 0 of pass 1",
        "Item 1 of pass 1",
        "Item 2 of pass 7",
        "Item 0 of pass 7",
    ]


def test_what_cannot_be_shown_ends_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    items = [BrokenDict(a=1), Broken()]

    assert all(found is item for found, item in zip(Flow.from_iterable(items).print(9), items, strict=True))
    assert "cannot be described" in capsys.readouterr().err


def test_none_may_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(Flow(Items()).print(0))) == 20
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("items", [-1, True, 1.5])
def test_a_number_of_items_that_is_none_is_refused_at_once(items: Any) -> None:
    with pytest.raises(UsageError, match="items to print"):
        Flow.from_iterable([1]).print(items)
