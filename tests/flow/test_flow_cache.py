"""Items kept in memory: when, which, and that consumers cannot change them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.loaders import Flow


class Pair(NamedTuple):
    image: Any
    label: Any


def test_kept_items_are_read_only() -> None:
    source = [
        {"x": np.zeros(2), "more": [np.zeros(2), {"y": np.zeros(2)}]},
        Pair(np.zeros(2), 1),
        np.zeros(2),
        "t",
    ]
    flow = Flow.from_iterable(source).cache()
    for _ in range(2):
        first, second, third, text = flow
        for array in (first["x"], first["more"][0], first["more"][1]["y"], second.image, third):
            assert array.tolist() == [0, 0]
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 1
        assert second.label == 1
        assert text == "t"
        first["x"] = "spoilt"
        first["more"].clear()
    for array in (source[0]["x"], source[2]):  # type: ignore[index, call-overload]
        array[:] = 7  # the source's own is another
    assert next(iter(flow))["x"].tolist() == [0, 0]


def test_an_array_that_the_source_writes_to_again_is_copied() -> None:
    def begin() -> Iterator[np.ndarray]:
        row = np.zeros(2)
        for number in range(3):
            row[:] = number
            yield row

    flow = Flow.from_callable(begin).cache()
    assert [row.tolist() for row in flow] == [row.tolist() for row in flow] == [[0, 0], [1, 1], [2, 2]]
    assert flow.batches_never_change
