"""Steps on the components of tuples, lists, named tuples and dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow


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
