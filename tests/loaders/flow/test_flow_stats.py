"""What a flow says of itself: its counts are exact, and its verdict names the stage that was made slow."""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardprep.loaders.flow import Flow, FlowStats
from shardprep.loaders.loader.stats import STEP, GroupTimes
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


GENERATOR = Flow.from_callable(slowly)
BOTTLENECKS: dict[str, tuple[Flow, str, str]] = {
    "a map": (numbers().map(slow), "map(slow)", "do it in a map() with threads= or processes="),
    "a map in threads": (numbers().map(slow, threads=2), "map(slow)", "more threads help"),
    "a map of a component": (numbers().zip().map_component(slow, 0), "map_component(slow, 0)", "threads="),
    "a map picked by number": (numbers().map(slow).shuffle(40), "map(slow)", "threads="),
    "a filter": (numbers().filter(slow), "filter(slow)", "threads= or processes="),
    "a generator": (GENERATOR, "from_callable(slowly)", "prefetch()"),
    "a generator before threads": (GENERATOR.map(abs, threads=2), "from_callable(slowly)", "prefetch()"),
    "a generator in a thread": (GENERATOR.prefetch(2).batch(2), "from_callable(slowly)", "share one thread"),
    "a slow source": (Flow.fake(40, size=(8, 8), seconds=SLOW_S), "fake", "give fewer seconds"),
    "a process": (GENERATOR.in_process(), "in_process()", "share one process"),
    "the consumer": (numbers(8).map(abs).batch(4), STEP, "a faster flow would gain nothing"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "a process" else n for n in BOTTLENECKS]
)
def test_the_verdict_names_the_stage_that_is_slow_and_what_helps(name: str) -> None:
    flow, limit, says = BOTTLENECKS[name]

    verdict = drawn(flow, step=0.5 if limit == STEP else 0).verdict

    assert verdict is not None
    assert (verdict.limit, says in verdict.advice) == (limit, True), str(verdict)


def test_the_consumers_thread_is_shared_out_among_all_that_it_does() -> None:
    stats = drawn(numbers().map(abs).map(abs, threads=2).batch(4), step=SLOW_S)
    own = [load for load in stats.loads if load.place == "main"]

    values = json.loads(json.dumps(stats.to_dict()))
    assert own[-1].name == STEP
    assert values["verdict"] == (stats.verdict and stats.verdict.to_dict())
    names = ["from_iterable(list)", *["map(abs)"] * 2, "batch(4)", "hand-over", STEP]  # as the data flows
    assert [load["name"] for load in values["loads"]] == [load.name for load in stats.loads] == names
    assert {group["name"] for group in values["groups"]} == {"main", "map(abs)"}
    assert sum(load.utilisation for load in own) + own[0].starved == pytest.approx(1, abs=0.02)


@pytest.mark.torture
@pytest.mark.parametrize("batch", [False, True], ids=["items", "batches"])
def test_the_stages_of_worker_processes_are_named(batch: bool) -> None:
    flow = Flow.fake(120, size=(8, 8)).map(slow, processes=2)

    stats = drawn(flow.batch(4) if batch else flow)

    assert stats.verdict is not None
    assert (stats.verdict.limit, stats.verdict.unit) == ("map(slow)", "rows" if batch else "items")
    assert "workers" in stats.verdict.advice
    assert {"fake", "map(slow)", "transport"} <= {load.name for load in stats.loads if load.place == "worker"}


@pytest.mark.parametrize(("starved", "own", "limit"), [(0.2, 0.6, "f"), (0.0, 0.3, "g"), (0.1, 0.1, STEP)])
def test_a_stage_of_over_a_tenth_of_the_time_limits(starved: float, own: float, limit: str) -> None:
    """The one that the consumer waits for comes first."""
    main = GroupTimes("main", "main", 1, {"g": own}, starved)
    groups = {((), -1): main, ((), 1): GroupTimes("f", "thread", 1, {"f": 0.9})}
    stats = FlowStats(False, rows=10, timed=10, elapsed=1.0, drawing=starved + own, groups=groups)

    assert stats.verdict
    assert stats.verdict.limit == limit


def test_counts_are_exact_over_passes_that_ended_and_passes_that_were_left() -> None:
    flow = numbers(10).batch(4)

    list(flow)
    left = iter(flow)
    next(left)
    del left
    list(flow.at_pass(7))
    stats = flow.stats()

    assert (stats.passes, stats.items, stats.rows, stats.timed) == (3, 7, 24, 12)
    assert stats.unit == "rows"


def test_only_what_came_after_other_stats_counts_also_when_the_flow_is_closed() -> None:
    flow = numbers(10).map(slow, threads=2)
    list(flow)
    before = flow.stats()
    list(flow)
    flow.close()

    later = flow.stats().since(before)

    assert (later.passes, later.items, later.rows, later.unit) == (1, 10, 10, "items")
    whole = Flow.from_parts(lambda part: range(10), parts=1)
    assert len([*whole.part(0, 0)]) == 10
    assert (whole.stats().passes, whole.stats().items) == (1, 10), "as a sender takes it"
    assert all(seconds >= 0 for group in later.groups.values() for seconds in group.stages.values())


def test_before_a_second_item_nothing_is_known() -> None:
    flow = numbers()
    items, stats = iter(flow), [flow.stats()]
    next(items)
    stats.append(flow.stats())

    assert [each.verdict for each in stats] == [None, None]
    assert [each.loads for each in stats] == [(), ()]
    assert "nothing is known" in str(stats[1])


@pytest.mark.parametrize(
    "make", [lambda: numbers(), lambda: Flow.from_callable(slowly)], ids=["length", "none"]
)
def test_a_watched_flow_shows_its_rate_and_the_stage_that_limits(
    make: Callable[[], Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress_bar, "WINDOW_S", 10 * SLOW_S)  # or drawing the bar is what takes the time

    assert list(watched(make().map(slow, threads=1), title="train")) == list(range(40))
    assert "train" in terminal.getvalue()
    assert "items/s, map(slow) limits" in terminal.getvalue() or "from_callable" in terminal.getvalue()
