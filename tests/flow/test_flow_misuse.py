"""Invalid arguments are refused by the call that has them, with advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import ArraySpec, Flow

FLOW = Flow.from_iterable(range(10))

NO_COUNTS: list[Any] = ["x", -1, 1.5, math.nan, [], object(), b"x", True]
NO_SEEDS: list[Any] = [*NO_COUNTS, None, 1 << 70]
NO_FUNCTIONS: list[Any] = ["x", 5, None, []]
NO_TIMES: list[Any] = ["x", -1, 0, math.nan, math.inf, [], True]
NO_WEIGHTS: list[Any] = ["x", 5, [None, 1], ["x", 1], [-1, 1], [0, 0], [1], [math.nan, 1]]
NO_OUTPUTS: list[Any] = [
    5,
    "x",
    [],
    [1],
    [ArraySpec("a", (2,), "float32")] * 2,
]

MISUSES: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "map": (lambda value: FLOW.map(value), NO_FUNCTIONS),
    "map threads": (lambda value: FLOW.map(abs, threads=value), [*NO_COUNTS, None]),
    "map processes": (lambda value: FLOW.map(abs, processes=value), [*NO_COUNTS, None]),
    "map seed": (lambda value: FLOW.map(abs, seed=value), NO_SEEDS),
    "map deadline": (lambda value: FLOW.map(abs, processes=1, deadline=value), NO_TIMES),
    "map outputs": (lambda value: FLOW.map(abs, processes=1, outputs=value), NO_OUTPUTS),
    "ArraySpec": (lambda value: ArraySpec("a", (2,), value), ["no dtype", "object", ",", 5]),
    "ArraySpec shape": (
        lambda value: ArraySpec("a", value, "uint8"),
        [(-2,), (2.5,), [2], 2, None, (1 << 63,)],
    ),
    "map_component": (lambda value: FLOW.map_component(value, 0), NO_FUNCTIONS),
    "map_component of": (lambda value: FLOW.map_component(abs, value), [1.5, None, True, []]),
    "filter": (lambda value: FLOW.filter(value), NO_FUNCTIONS),
    "select": (lambda value: FLOW.select(value), [1.5, None, True, []]),
    "shuffle": (lambda value: FLOW.shuffle(value), [*NO_COUNTS, None, 0]),
    "shuffle seed": (lambda value: FLOW.shuffle(3, seed=value), NO_SEEDS),
    "batch": (lambda value: FLOW.batch(value), [*NO_COUNTS, None, 0]),
    "batch remainder": (lambda value: FLOW.batch(3, remainder=value), ["x", None, 5, []]),
    "batch_by_shape": (lambda value: FLOW.batch_by_shape(value), [*NO_COUNTS, None, 0]),
    "repeat": (lambda value: FLOW.repeat(value), NO_COUNTS),
    "take": (lambda value: FLOW.take(value), [*NO_COUNTS, None]),
    "skip": (lambda value: FLOW.skip(value), [*NO_COUNTS, None]),
    "concat": (lambda value: FLOW.concat(value), [[1], None]),
    "mix weights": (lambda value: FLOW.mix(FLOW, weights=value), NO_WEIGHTS),
    "choose weights": (lambda value: FLOW.choose(FLOW, weights=value), NO_WEIGHTS),
    "prefetch": (lambda value: FLOW.prefetch(value), [*NO_COUNTS, None, 0]),
    "in_process": (lambda value: FLOW.in_process(ahead=value), [*NO_COUNTS, None, 0]),
    "print": (lambda value: FLOW.print(value), [*NO_COUNTS, None]),
    "at_pass": (lambda value: FLOW.at_pass(value), [*NO_COUNTS, None, 1 << 63]),
    "peek": (lambda value: FLOW.peek(value), [*NO_COUNTS, None]),
    "pick pass": (lambda value: FLOW.pick(value, [0]), [*NO_COUNTS, None, 1 << 63]),
    "pick numbers": (lambda value: FLOW.pick(0, value), [5, None]),
    "pick a number": (lambda value: list(FLOW.pick(0, [value])), ["x", 1.5, None, True]),
    "measure": (lambda value: FLOW.measure(seconds=value), ["x", -1, math.nan, math.inf, None, True]),
    "from_iterable": (Flow.from_iterable, ["x", b"x", 5, None, {}, iter([1])]),
    "from_callable": (Flow.from_callable, NO_FUNCTIONS),
    "fake": (Flow.fake, [*NO_COUNTS, None]),
    "fake seconds": (lambda value: Flow.fake(1, seconds=value), ["x", -1, math.nan, None]),
    "fake seed": (lambda value: Flow.fake(1, seed=value), NO_SEEDS),
}


@pytest.mark.parametrize("name", MISUSES)
def test_an_invalid_argument_is_refused_by_the_call_that_has_it(name: str) -> None:
    use, values = MISUSES[name]
    for value in values:
        with pytest.raises(UsageError) as caught:
            use(value)
        assert str(caught.value)
