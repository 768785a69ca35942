"""Functions of each item, in the consumer's thread and in threads: equal results and failures."""

from __future__ import annotations

from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow

WAYS: dict[str, dict[str, Any]] = {"here": {}, "threads": {"threads": 3}}

each_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def drawn(flow: Flow) -> tuple[list[Any], BaseException | None]:
    """The items that a pass yields before it raises, and its exception."""
    found = []
    try:
        for item in flow:
            found.append(item)
    except BaseException as error:
        return found, error
    return found, None


def failing_at(number: int, error: BaseException) -> Any:
    def function(item: int) -> int:
        if item == number:
            raise error
        return item

    return function


@each_way
def test_a_function_that_raises_stop_iteration_ends_no_pass_silently(way: dict[str, Any]) -> None:
    found, raised = drawn(Flow.from_iterable(range(9)).map(failing_at(4, StopIteration()), **way))

    assert found == [0, 1, 2, 3]
    assert isinstance(raised, RuntimeError)
    assert isinstance(raised.__cause__, StopIteration)
    assert raised.__notes__[0].startswith("In item 4 of pass 0, at map(")


@each_way
def test_none_is_refused_with_the_items_number_and_what_to_do(way: dict[str, Any]) -> None:
    found, raised = drawn(Flow.from_iterable(range(9)).map(lambda x: None if x == 6 else x, **way))

    assert found == [0, 1, 2, 3, 4, 5]
    assert isinstance(raised, UsageError)
    assert "item 6" in str(raised)
    assert "drop_none=True" in str(raised)
