"""The output of ``print``, which changes no item."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.loaders.flow.steps import describe


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
