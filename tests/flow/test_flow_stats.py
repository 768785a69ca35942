"""What a flow says of itself: its counts are exact, and its verdict names the stage that was made slow."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardprep.loaders.flow import Flow, FlowStats
from shardprep.loaders.measuring import progress_bar, watched

SLOW_S = 0.003


def slow(item: Any) -> Any:
    time.sleep(SLOW_S)
    return item


def slowly() -> Iterator[int]:
    yield from map(slow, range(40))


def numbers(items: int = 40) -> Flow:
    return Flow.from_iterable(list(range(items)))


def drawn(flow: Flow, step: float = 0.0) -> FlowStats:
    with flow:
        for _ in flow:
            time.sleep(step)
        return flow.stats()


@pytest.mark.torture
@pytest.mark.parametrize("batch", [False, True], ids=["items", "batches"])
def test_the_stages_of_worker_processes_are_named(batch: bool) -> None:
    flow = Flow.fake(120, size=(8, 8)).map(slow, processes=2)

    stats = drawn(flow.batch(4) if batch else flow)

    assert stats.verdict is not None
    assert (stats.verdict.limit, stats.verdict.unit) == ("map(slow)", "rows" if batch else "items")
    assert "workers" in stats.verdict.advice
    assert {"fake", "map(slow)", "transport"} <= {load.name for load in stats.loads if load.place == "worker"}


@pytest.mark.slow
def test_a_step_in_another_process_is_named() -> None:
    verdict = drawn(Flow.from_callable(slowly).in_process()).verdict

    assert verdict is not None
    assert (verdict.limit, "share one process" in verdict.advice) == ("in_process()", True)


def test_before_a_second_item_nothing_is_known() -> None:
    flow = numbers()
    stats = [flow.stats()]
    items = iter(flow)
    next(items)
    stats.append(flow.stats())

    assert [each.verdict for each in stats] == [None, None]
    assert [each.loads for each in stats] == [(), ()]
    assert "nothing is known" in str(stats[1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "make", [lambda: numbers(), lambda: Flow.from_callable(slowly)], ids=["length", "none"]
)
def test_a_watched_flow_shows_its_rate_and_the_stage_that_limits(
    make: Callable[[], Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress_bar, "WINDOW_S", 0.0)

    found = list(watched(make().map(slow, threads=1), title="train"))

    assert found == list(range(40))
    assert "train" in terminal.getvalue()
    assert "items/s, map(slow) limits" in terminal.getvalue() or "from_callable" in terminal.getvalue()
