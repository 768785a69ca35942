"""Functions of each item, in the consumer's thread and in threads: equal results and failures."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from support.flow_members import Items

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
def test_an_exception_comes_as_itself_after_the_results_before_it_with_its_place(way: dict[str, Any]) -> None:
    error = KeyError("no")
    flow = Flow.from_iterable(range(50)).map(failing_at(17, error), **way)

    for number in range(2):
        found, raised = drawn(flow)
        assert found == list(range(17))
        assert raised is error
        assert error.__notes__[number].startswith(f"In item 17 of pass {number}, at map(failing_at.")


@each_way
def test_a_function_that_raises_stop_iteration_ends_no_pass_silently(way: dict[str, Any]) -> None:
    found, raised = drawn(Flow.from_iterable(range(9)).map(failing_at(4, StopIteration()), **way))

    assert found == [0, 1, 2, 3]
    assert isinstance(raised, RuntimeError)
    assert isinstance(raised.__cause__, StopIteration)
    assert raised.__notes__[0].startswith("In item 4 of pass 0, at map(")


@each_way
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interruptions_and_exits_pass_as_they_are(way: dict[str, Any], error: BaseException) -> None:
    _, raised = drawn(Flow.from_iterable(range(9)).map(failing_at(4, error), **way))

    assert raised is error
    assert not hasattr(raised, "__notes__")


@each_way
def test_what_the_source_raises_comes_after_the_results_before_it(way: dict[str, Any]) -> None:
    def source() -> Iterator[int]:
        yield from range(20)
        raise OSError("gone")

    found, raised = drawn(Flow.from_callable(source).map(lambda x: -x, **way))

    assert found == [-x for x in range(20)]
    assert isinstance(raised, OSError)
    assert not hasattr(raised, "__notes__")


@each_way
def test_none_is_refused_with_the_items_number_and_what_to_do(way: dict[str, Any]) -> None:
    found, raised = drawn(Flow.from_iterable(range(9)).map(lambda x: None if x == 6 else x, **way))

    assert found == [0, 1, 2, 3, 4, 5]
    assert isinstance(raised, UsageError)
    assert "item 6" in str(raised)
    assert "drop_none=True" in str(raised)


def jitter(item: int, rng: np.random.Generator) -> tuple[int, int]:
    return item, int(rng.integers(1 << 60))


@each_way
def test_randomness_is_of_the_seed_the_pass_and_the_items_number(way: dict[str, Any]) -> None:
    flow = Flow.from_iterable(range(30)).map(jitter, random=True, seed=5, **way)
    here = Flow.from_iterable(range(30)).map(jitter, random=True, seed=5)
    other = Flow.from_iterable(range(30)).map(jitter, random=True, seed=6, **way)

    passes = [list(flow.at_pass(number)) for number in (0, 1)]

    assert passes == [list(here.at_pass(number)) for number in (0, 1)]
    assert len({drawn for items in [*passes, other] for _, drawn in items}) == 90


@each_way
def test_a_picked_items_exception_names_its_own_number(way: dict[str, Any]) -> None:
    flow = Flow.from_iterable(range(30)).map(failing_at(17, KeyError()), **way)
    picked = flow.pick(3, [4, 4, 17, 5])

    assert [next(picked), next(picked)] == [4, 4]
    with pytest.raises(KeyError) as raised:
        next(picked)
    assert "In item 17 of pass 3" in raised.value.__notes__[0]


@each_way
def test_the_source_ends_with_the_pass_also_where_that_fails(way: dict[str, Any]) -> None:
    source = Items()
    flow = Flow(source).map(lambda item: 1 // (item[1] - 5), **way)

    assert isinstance(drawn(flow)[1], ZeroDivisionError)
    assert source.ended == [0]


@each_way
@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.0, True])
def test_a_seed_that_is_none_is_refused_at_once(way: dict[str, Any], seed: Any) -> None:
    with pytest.raises(UsageError, match="seed"):
        Flow.from_iterable([1]).map(jitter, random=True, seed=seed, **way)


@each_way
def test_neither_an_item_nor_its_result_is_held(way: dict[str, Any]) -> None:
    seen: list[weakref.ref[np.ndarray]] = []

    def noting(item: tuple[np.ndarray, int]) -> np.ndarray:
        seen.append(weakref.ref(item[0]))
        return item[0]

    flow = Flow(Items(1)).map(noting, **way)
    results = iter(flow)
    result = next(results)

    assert seen[0]() is result
    del result
    assert seen[0]() is None
    assert list(results) == []


@pytest.mark.parametrize(
    ("error", "expected"), [(StopIteration(), RuntimeError), (KeyError(), KeyError)], ids=str
)
def test_a_predicates_exception_has_its_place(error: Exception, expected: type[Exception]) -> None:
    found, raised = drawn(Flow.from_iterable(range(1, 9)).filter(failing_at(4, error)))

    assert found == [1, 2, 3]
    assert type(raised) is expected
    assert raised.__notes__[0].startswith("In item 3 of pass 0, at filter(")


def test_a_predicate_without_a_truth_value_is_an_error_with_its_place() -> None:
    _, raised = drawn(Flow(Items()).filter(lambda item: item[0] > 1))

    assert isinstance(raised, ValueError)
    assert "In item 0 of pass 0" in raised.__notes__[0]
