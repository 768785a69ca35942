"""The contract of every step of a flow: it ends its source, holds no item, and takes endless ones or none."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import isfunction
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batches.passes import end_pass
from shardprep.loaders.flow.node import INFINITE, Length, Node, PassContext


@dataclass(frozen=True)
class Items(Node):
    """``count`` items, None for endless ones; the n-th is (float32 [2] of n, n), a new one at each draw."""

    count: int | None = 20
    can_pick: bool = True  # type: ignore[misc]
    open: list[int] = field(default_factory=list, compare=False)
    """The numbers of the passes under way."""

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @property
    def length(self) -> Length:
        return INFINITE if self.count is None else Length(self.count)

    def run(self, ctx: PassContext) -> Iterator[Any]:
        return self._items(ctx, range(1 << 40 if self.count is None else self.count))

    def pick(self, ctx: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        return self._items(ctx, self.check_numbers(numbers)) if self.can_pick else super().pick(ctx, numbers)

    def _items(self, ctx: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        self.open.append(ctx.number)
        try:
            for number in numbers:
                yield np.full(2, number, np.float32), number
        finally:
            self.open.remove(ctx.number)


def negated(item: Any) -> Any:
    return -item[0], -item[1]


def jittered(item: Any, rng: np.random.Generator) -> Any:
    return item[0] + rng.random(2, np.float32), item[1]


def none_of_each_third(item: Any) -> Any:
    return item if item[1] % 3 else None


def reshaped(item: Any) -> Any:
    """An array of one of three shapes."""
    return np.full(1 + item[1] % 3, item[1])


STEPS: dict[str, Callable[[Flow], Flow]] = {
    "shuffle": lambda flow: flow.shuffle(7),
    "shuffle of all": lambda flow: flow.shuffle(1000),
    "repeat": lambda flow: flow.repeat(3),
    "repeat for ever": lambda flow: flow.repeat().take(50),
    "take": lambda flow: flow.take(7),
    "take more": lambda flow: flow.take(1000),
    "skip": lambda flow: flow.skip(3),
    "concat": lambda flow: flow.take(5).concat(flow),
    "zip": lambda flow: flow.zip(flow.shuffle(4), flow.take(15)),
    "mix": lambda flow: flow.mix(flow.take(9)),
    "mix with weights": lambda flow: flow.mix(flow.take(9), weights=(1.5, 0.3)),
    "choose": lambda flow: flow.choose(flow.take(9).repeat(), weights=(0.2, 0.8)),
    "cache": lambda flow: flow.cache(),
    "prefetch": lambda flow: flow.prefetch(3),
    "prefetch all": lambda flow: flow.prefetch(1 << 62),
    "prefetch one": lambda flow: flow.prefetch(1),
    "map": lambda flow: flow.map(negated),
    "map, random": lambda flow: flow.map(jittered, random=True),
    "map, drop_none": lambda flow: flow.map(none_of_each_third, drop_none=True),
    "map, threads": lambda flow: flow.map(negated, threads=3),
    "map, threads, random": lambda flow: flow.map(jittered, random=True, threads=3),
    "map, threads, drop_none": lambda flow: flow.map(none_of_each_third, drop_none=True, threads=3),
    "filter": lambda flow: flow.filter(lambda item: item[1] % 2),
    "map_component": lambda flow: flow.map_component(np.negative, 0),
    "select": lambda flow: flow.select(0, -1, 0),
    "batch": lambda flow: flow.batch(3),
    "batch, drop": lambda flow: flow.batch(3, remainder="drop"),
    "batch, pad": lambda flow: flow.batch(3, remainder="pad"),
    "batch, as_list": lambda flow: flow.batch(3, as_list=True),
    "batch of map": lambda flow: flow.map(negated).batch(3),
    "pad": lambda flow: flow.map(reshaped).batch(3, as_list=True).pad(-1),
    "batch_by_shape": lambda flow: flow.map(reshaped).batch_by_shape(2),
    "batch_by_shape, as_list": lambda flow: flow.map(reshaped).batch_by_shape(2, as_list=True),
    "unbatch": lambda flow: flow.batch(3).unbatch(),
    "print": lambda flow: flow.print(1),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
with_and_without_numbers = pytest.mark.parametrize("can_pick", [True, False], ids=["numbers", "no numbers"])


def test_each_step_is_among_these_or_needs_processes() -> None:
    functions = filter(isfunction, vars(Flow).values())
    steps = {each.__name__ for each in functions if each.__annotations__.get("return") == "Flow"}
    assert steps - {name.replace(",", "").split()[0] for name in STEPS} == {"transform", "in_process"}


def test_an_option_that_is_left_at_its_default_does_not_change_a_state() -> None:
    assert [Flow(Items(n)).state_dict()["flow"] for n in (20, 5)] == [["items()"], ["items(count=5)"]]


def array_in(item: Any) -> np.ndarray:
    """The first array in an item."""
    while not isinstance(item, np.ndarray):
        item = next(iter(item.values() if isinstance(item, dict) else item))
    return item


@every_step
@with_and_without_numbers
def test_a_pass_that_is_over_has_ended_its_source(step: Callable[[Flow], Flow], can_pick: bool) -> None:
    source = Items(can_pick=can_pick)
    list(step(Flow(source)))
    assert source.open == []


@pytest.mark.parametrize("name", sorted({*STEPS} - {"cache"}))
@with_and_without_numbers
def test_nothing_is_held_once_it_was_yielded(name: str, can_pick: bool) -> None:
    flow = STEPS[name](Flow(Items(can_pick=can_pick)))
    for items in [iter(flow), *([flow.pick(0, cycle([0, 1]))] if flow.can_pick else [])]:
        for _ in range(4):
            seen = weakref.ref(array_in(next(items)))
            gc.collect()
            assert seen() is None
        end_pass(items)


@every_step
def test_an_endless_source_is_either_refused_or_drawn_from_as_needed(step: Callable[[Flow], Flow]) -> None:
    source = Items(count=None, can_pick=False)
    try:
        flow = step(Flow(source))
    except UsageError:
        return
    items = iter(flow)
    assert len(list(islice(items, 9))) > 0  # also of a second, endless flow
    end_pass(items)
    assert flow.length.is_exact or flow.length.count == float("inf")
    gc.collect()
    assert source.open == []
