"""A flow from parts: one item of each in turn, in every pass, and nothing is left open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow


def noisy(number: int, rng: np.random.Generator) -> tuple[int, float]:
    return number, float(rng.random())


def test_a_part_may_be_a_flow_with_random_values_of_its_own_and_of_the_pass() -> None:
    flow = Flow.from_parts(lambda part: Flow.from_iterable(range(4)).map(noisy, random=True), parts=2)

    passes = [list(flow.at_pass(number)) for number in (0, 1)]

    assert list(flow.at_pass(1)) == passes[1]
    assert [[number for number, _ in each] for each in passes] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert len({value for each in passes for _, value in each}) == 16


class Opened:
    """Generators for the parts, and which are open."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def __call__(self, part: int) -> Iterator[int]:
        self.open.add(part)
        try:
            yield from range(3)
        finally:
            self.open.remove(part)


def test_leaving_a_pass_closes_all_parts() -> None:
    opened = Opened()
    items = iter(Flow.from_parts(opened, parts=3))
    next(items)
    next(items)
    assert opened.open == {0, 1}

    items.close()  # type: ignore[attr-defined]

    assert opened.open == set()


def test_an_error_names_the_part() -> None:
    def make(part: int) -> Any:
        return [1, 2] if part < 2 else 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        list(Flow.from_parts(make, parts=3))
    assert "In item 2 of pass 0, at from_parts(" in raised.value.__notes__[0]


def test_a_part_without_items_is_an_error() -> None:
    with pytest.raises(UsageError, match="returned a int, which has no items"):
        list(Flow.from_parts(lambda part: 3, parts=1))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("parts", [0, -1, 2.0, True])
def test_there_is_at_least_one_part(parts: Any) -> None:
    with pytest.raises(UsageError, match="the number of parts"):
        Flow.from_parts(range, parts=parts)


def test_a_part_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="part 2 of a flow of 2"):
        Flow.from_parts(range, parts=2).part(0, 2)
