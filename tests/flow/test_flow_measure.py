"""The measurement of a flow: that its figures are consistent, not how large they are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.loader.stats import Arrivals, window_rates
from support.flow_members import Items

ITEM_BYTES = 8  # of an item of Items: float32 [2]; its int does not count


def test_a_short_flow_is_measured_over_as_many_passes_as_it_takes() -> None:
    source = Items(7)
    flow = Flow(source)

    speed = flow.measure(seconds=0.05)

    assert speed.seconds >= 0.05
    assert speed.passes == len(source.ended) > 1
    assert source.ended == list(range(speed.passes))
    assert 7 * (speed.passes - 1) <= speed.items + 1 <= 7 * speed.passes
    assert speed.rows is None
    assert speed.rows_per_second is None
    assert speed.megabytes_per_second == pytest.approx(speed.items_per_second * ITEM_BYTES / 1e6)
    assert 0 < speed.p50_milliseconds <= speed.p99_milliseconds
    assert speed.first_item_seconds > 0
    assert speed.cpu_seconds_per_item > 0


def test_the_passes_measured_are_the_flows_next_ones() -> None:
    source = Items(3)
    flow = Flow(source)
    list(flow)

    speed = flow.measure(seconds=0)
    list(flow)

    assert source.ended == list(range(speed.passes + 2))


def test_an_endless_flow_is_left_when_the_time_is_up() -> None:
    source = Items(None)
    speed = Flow(source).map(lambda item: item, threads=2).measure(seconds=0.05)

    assert speed.passes == 1
    assert source.ended == [0]


def test_one_item_per_pass_is_enough() -> None:
    speed = Flow(Items(1)).measure(seconds=0)

    assert speed.items >= 1
    assert speed.passes == speed.items + 1


def test_bytes_are_those_of_arrays_and_bytes_at_any_depth() -> None:
    item = {"x": (np.zeros((2, 3)), [b"abc", memoryview(bytearray(4))]), "y": "text", "z": np.int16(1)}
    speed = Flow.from_iterable([item]).measure(seconds=0)

    assert speed.megabytes_per_second == pytest.approx(speed.items_per_second * (48 + 3 + 4 + 2) / 1e6)


@pytest.mark.parametrize("as_list", [False, True])
def test_rows_are_counted_where_the_flow_makes_batches(as_list: bool) -> None:
    speed = Flow(Items(10)).batch(4, as_list=as_list).filter(lambda _: True).prefetch().measure(seconds=0.02)

    assert speed.rows is not None
    assert speed.rows_per_second is not None
    assert 2 * speed.items <= speed.rows <= 4 * speed.items
    assert speed.rows_per_second == pytest.approx(speed.items_per_second * speed.rows / speed.items)


def test_rows_are_not_counted_where_items_are_made_of_batches() -> None:
    batches = Flow(Items(10)).batch(4)
    assert batches.unbatch().measure(seconds=0).rows is None
    assert batches.map(lambda batch: batch[0]).measure(seconds=0).rows is None


def test_time_between_items_and_cpu_are_told_apart() -> None:
    def slow() -> Iterator[int]:
        for number in count():
            time.sleep(0.01)
            yield number

    speed = Flow.from_callable(slow).measure(seconds=0.1)

    assert speed.p50_milliseconds >= 10
    assert speed.items_per_second <= 100
    assert speed.cpu_seconds_per_item < speed.seconds / speed.items


def test_what_was_measured_is_json_and_a_sentence() -> None:
    speed = Flow(Items(10)).batch(4).measure(seconds=0.01)

    assert json.loads(json.dumps(speed.to_dict())) == speed.to_dict()
    text = str(speed)
    assert "\n" not in text
    for word in ("items/s", "rows/s", "MB/s", "passes", "ms", "CPU"):
        assert word in text
    assert "rows/s" not in str(Flow(Items(10)).measure(seconds=0))


def test_a_flow_without_items_is_not_measured() -> None:
    with pytest.raises(UsageError, match="no items"):
        Flow.from_iterable([]).measure(seconds=0.1)


def test_a_flow_that_runs_dry_is_not_measured_for_ever() -> None:
    left = [3, 2, 1, 0]
    with pytest.raises(UsageError, match="no items"):
        Flow.from_callable(lambda: range(left.pop(0))).measure(seconds=1e6)


def test_what_the_flow_raises_is_raised() -> None:
    source = Items(None)
    with pytest.raises(ZeroDivisionError):
        Flow(source).map(lambda item: 1 / (5 - item[1])).measure(seconds=1e6)
    assert source.ended == [0]


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError, match="seconds"):
        Flow(Items()).measure(seconds=seconds)


def test_every_window_counts_what_came_after_its_beginning() -> None:
    arrivals = [(0.0, 9), (1.0, 10), (1.5, 10), (3.0, 20), (3.5, 7)]

    assert window_rates(arrivals, 1.0) == [10.0, 15.0]


def test_what_arrives_first_counts_for_nothing_but_the_beginning() -> None:
    arrivals = Arrivals(iter([100, 2, 3, 4]), lambda thing: thing)
    for _ in range(4):
        arrivals.draw()

    assert (arrivals.count, arrivals.amount) == (3, 9)
    assert arrivals.rate == pytest.approx(9 / arrivals.seconds)
    with pytest.raises(StopIteration):
        arrivals.draw()
