"""Steps on the components of tuples, lists, named tuples and dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow


def test_the_other_components_are_the_very_same() -> None:
    image, label = np.zeros(3), object()

    (found,) = Flow.from_iterable([(image, label, 1)]).map_component(lambda x: x + 1, 2)

    assert found[0] is image
    assert found[1] is label


def test_a_component_may_become_none() -> None:
    assert list(Flow.from_iterable([(1, 2)]).map_component(lambda x: None, 0)) == [(None, 2)]


def test_a_components_randomness_is_of_the_item_and_the_pass() -> None:
    flow = Flow.from_iterable([(n, 0) for n in range(9)]).map_component(
        lambda _, rng: int(rng.integers(1 << 60)), 1, random=True, seed=3
    )
    first, second = list(flow), list(flow)

    assert first == list(flow.at_pass(0))
    assert len({value for _, value in first + second}) == 18
    assert list(flow.pick(0, [7, 2])) == [first[7], first[2]]


def test_what_a_components_function_raises_has_its_place() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        list(Flow.from_iterable([(2, 1), (2, 0)]).map_component((1).__truediv__, 1))
    assert raised.value.__notes__ == ["In item 1 of pass 0, at map_component(int.__truediv__, 1)"]


@pytest.mark.parametrize(
    ("item", "component", "message"),
    [
        ((1, 2), 2, "item 1 has no component 2: it has 2, numbered from 0"),
        ((1, 2), -3, "item 1 has no component -3"),
        ((1, 2), "a", "item 1 has no component 'a'"),
        ({"a": 1, "b": 2}, "c", "item 1 has no component 'c': it has a, b"),
        ({"a": 1, "b": 2}, 0, "item 1 has no component 0: it has a, b"),
        ({}, "a", "item 1 has no component 'a': it has none"),
        (b"ab", 0, "item 1 is bytes, and only tuples, lists and dicts have components"),
        (np.zeros(3), 0, "item 1 is ndarray"),
        (None, 0, "item 1 is NoneType"),
    ],
    ids=str,
)
def test_a_component_that_is_not_there_is_an_error_with_the_items_number(
    item: Any, component: int | str, message: str
) -> None:
    first: Any = (1, 2, 3) if isinstance(component, int) else {"a": 1, "c": 3}
    first = first if component != -3 else (1, 2, 3)
    source = Flow.from_iterable([first, item])
    for flow in (source.select(component), source.map_component(lambda x: x, component)):
        with pytest.raises(UsageError, match=message):
            list(flow)


@pytest.mark.parametrize("components", [(), (0, "a"), ("a", "a"), (True,), (1.0,), (None,)], ids=str)
def test_invalid_components_are_refused_at_once(components: Any) -> None:
    with pytest.raises(UsageError):
        Flow.from_iterable([]).select(*components)


@pytest.mark.parametrize("component", [True, 1.0, None, (0,)], ids=str)
def test_an_invalid_component_is_refused_at_once(component: Any) -> None:
    with pytest.raises(UsageError, match="component"):
        Flow.from_iterable([]).map_component(abs, component)
