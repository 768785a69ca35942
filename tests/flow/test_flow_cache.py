"""Items kept in memory: when, which, and that consumers cannot change them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow.passes import PassContext, PassResources
from shardprep.loaders.flow.sources import FromSequence
from shardprep.loaders.flow.steps import Cache, _Store, read_only
from support.flow_members import Items, all_of


class Pair(NamedTuple):
    image: Any
    label: Any


def counted(calls: list[int], items: int = 5) -> Flow:
    """A flow of unknown length that records the items it makes in ``calls``."""

    def begin() -> Iterator[int]:
        for number in range(items):
            calls.append(number)
            yield number

    return Flow.from_callable(begin)


def test_later_passes_draw_nothing() -> None:
    calls: list[int] = []
    flow = counted(calls).cache()
    assert [list(flow) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert calls == [0, 1, 2, 3, 4]


def test_a_pass_that_was_left_early_keeps_nothing() -> None:
    calls: list[int] = []
    flow = counted(calls).cache()
    for _ in range(2):
        items = iter(flow)
        list(islice(items, 5))
        end(items)  # before the consumer has reached the end
    assert list(flow) == list(flow) == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 3, 4] * 3


def test_nor_does_one_that_failed() -> None:
    fails = iter([True, False])
    flow = Flow.from_iterable([1, 2, 0]).map(lambda item: 6 // (item or 3 * (not next(fails)))).cache()
    with pytest.raises(ZeroDivisionError):
        list(flow)
    assert list(flow) == list(flow) == [6, 3, 2]


def test_the_last_item_completes_a_pass_of_exact_length() -> None:
    source = Items(4)
    node, kept = Cache(source), PassResources()
    items = node.run(PassContext(0, kept))
    list(islice(items, 4))
    end(items)
    assert all_of(node, PassContext(1, kept)) == all_of(Items(4))
    assert source.begun == [0]
    kept.close()


@pytest.mark.parametrize("how", ["take", "zip", "mix"])
def test_so_caches_fill_where_the_next_step_never_sees_the_end(how: str) -> None:
    calls: list[int] = []

    def noted(item: int) -> int:
        calls.append(item)
        return item

    cached = Flow.from_iterable(range(4)).map(noted).cache()
    others = Flow.from_iterable(range(4))
    flow = {
        "take": lambda: cached.take(4),
        "zip": lambda: others.zip(cached),
        "mix": lambda: cached.mix(others),
    }[how]()
    for _ in range(3):
        list(flow)
    assert calls == [0, 1, 2, 3]


def test_what_is_random_before_is_drawn_once() -> None:
    flow = Flow.from_iterable(range(50)).shuffle(50).cache()
    assert list(flow) == list(flow)
    after = Flow.from_iterable(range(50)).cache().shuffle(50)
    assert list(after) != list(after)


def test_an_empty_pass_is_kept_too() -> None:
    calls: list[int] = []

    def begin() -> list[int]:
        calls.append(1)
        return []

    flow = Flow.from_callable(begin).cache()
    assert list(flow) == list(flow) == []
    assert calls == [1]


def test_closing_the_flow_forgets() -> None:
    calls: list[int] = []
    flow = counted(calls).cache()
    list(flow)
    flow.close()
    list(flow)
    assert calls == [0, 1, 2, 3, 4] * 2


def test_dropping_the_flow_frees_the_items() -> None:
    array = np.zeros(3)
    seen = weakref.ref(array)
    flow = Flow.from_callable(lambda held=[array]: [held.pop()]).cache()
    del array
    list(flow)
    del flow
    gc.collect()
    assert seen() is None


def test_kept_items_are_read_only() -> None:
    source = [
        {"x": np.zeros(2), "more": [np.zeros(2), {"y": np.zeros(2)}]},
        Pair(np.zeros(2), 1),
        np.zeros(2),
        "t",
    ]
    flow = Flow.from_iterable(source).cache()
    for _ in range(2):
        first, second, third, text = flow
        for array in (first["x"], first["more"][0], first["more"][1]["y"], second.image, third):
            assert array.tolist() == [0, 0]
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 1
        assert second.label == 1
        assert text == "t"
        first["x"] = "spoilt"
        first["more"].clear()
    for array in (source[0]["x"], source[2]):  # type: ignore[index, call-overload]
        array[:] = 7  # the source's own is another
    assert next(iter(flow))["x"].tolist() == [0, 0]


def test_an_array_that_the_source_writes_to_again_is_copied() -> None:
    def begin() -> Iterator[np.ndarray]:
        row = np.zeros(2)
        for number in range(3):
            row[:] = number
            yield row

    flow = Flow.from_callable(begin).cache()
    assert [row.tolist() for row in flow] == [row.tolist() for row in flow] == [[0, 0], [1, 1], [2, 2]]
    assert flow.batches_never_change


def test_one_that_is_left_alone_is_not() -> None:
    flow = Flow.fake(3, size=(2, 2)).cache()
    for cached, (image, _) in zip(flow, Flow.fake(3, size=(2, 2)), strict=True):
        assert cached[0].tolist() == image.tolist()
    rows = FromSequence(Lasting([np.zeros(2)]))
    (item,) = Cache(rows).run(PassContext())
    assert np.shares_memory(item, rows.items[0])


class Lasting(list[Any]):
    batches_never_change = True


def test_read_only_arrays_are_views() -> None:
    array = np.arange(4)
    assert np.shares_memory(read_only((array,))[0], array)
    assert array.flags.writeable


def test_passes_at_once_in_threads_agree_from_then_on() -> None:
    flow = Flow.from_iterable(range(300)).shuffle(300).cache()
    found: list[list[int]] = []
    begun = threading.Barrier(6)

    def run(items: Iterator[int]) -> None:
        begun.wait()
        found.append(list(items))

    threads = [threading.Thread(target=run, args=(iter(flow),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = [list(flow) for _ in range(5)]
    assert all(items == later[0] for items in later)
    assert later[0] in found


def test_of_two_passes_at_once_that_is_kept_which_is_complete_first() -> None:
    flow = Flow.from_iterable(range(50)).shuffle(50).cache()
    slow, fast = iter(flow), iter(flow)
    next(slow)
    kept = list(fast)
    assert list(slow) != kept[1:]
    assert list(flow) == kept


def test_each_branch_has_a_cache_of_its_own() -> None:
    numbers = Flow.from_iterable(range(3))
    flow = numbers.map(lambda item: item).cache().zip(numbers.map(lambda item: -item).cache())
    assert list(flow) == list(flow) == [(0, 0), (1, -1), (2, -2)]


def test_an_endless_flow_is_refused() -> None:
    with pytest.raises(UsageError, match="take"):
        Flow.from_iterable([1]).repeat().cache()


def test_a_pass_that_is_collected_in_the_middle_of_another_gives_back_what_it_borrowed() -> None:
    """The collector may run, and end it, wherever anything is allocated."""
    kept = PassResources()

    def borrowing() -> Iterator[Any]:
        with kept.borrowed((), _Store) as store:
            yield store

    left = borrowing()
    store = next(left)
    kept.shared(((), 1), lambda: left.close() or _Store())  # type: ignore[func-returns-value]
    with kept.borrowed((), _Store) as again:
        assert again is store
