"""Several flows as one: concatenated, zipped and mixed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow.combine import (
    Choose,
    Concat,
    Mix,
    SharedNumbers,
    Zip,
    weighted_choice,
    weights_of,
)
from shardprep.loaders.flow.node import INFINITE, UNKNOWN, at_most, exact
from shardprep.loaders.flow.passes import PassContext
from support.flow_members import Items

counts = st.lists(st.integers(0, 12), min_size=1, max_size=4)
weights = st.floats(1e-3, 1e3)


def flows_of(counts: list[int]) -> list[Flow]:
    """Items are (flow, number)."""
    return [Flow.from_iterable([(n, item) for item in range(count)]) for n, count in enumerate(counts)]


def test_a_flow_is_begun_when_the_one_before_it_has_ended() -> None:
    first, second = Items(2), Items(2)
    items = Concat((first, second)).run(PassContext(4))
    list(islice(items, 2))
    assert not second.begun
    next(items)
    assert first.ended == second.begun == [4]
    end(items)


def test_nothing_comes_after_an_endless_flow() -> None:
    endless = Flow.from_iterable([1]).repeat()
    with pytest.raises(UsageError, match="never reached"):
        endless.concat(Flow.from_iterable([2]))
    assert list(islice(Flow.from_iterable([2]).concat(endless), 3)) == [2, 1, 1]


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (3, 3)])
def test_when_one_ends_all_have_ended_and_none_after_it_was_asked(lengths: tuple[int, int]) -> None:
    sources = [Items(count) for count in lengths]
    for _ in Zip(tuple(sources)).run(PassContext()):
        pass
    assert all(source.begun == source.ended == [0] for source in sources)

    asked = []

    def begin() -> Iterator[int]:
        for number in range(9):
            asked.append(number)
            yield number

    assert len(list(Flow.from_iterable(range(3)).zip(Flow.from_callable(begin)))) == 3
    assert asked == [0, 1, 2]


def test_a_name_that_two_dicts_have_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"names in common.*rename"):
        list(Flow.from_iterable([{"a": 1}]).zip(Flow.from_iterable([{"a": 2}])))


def test_a_flow_beside_itself_is_drawn_from_twice_and_shuffled_twice() -> None:
    shuffled = Flow.from_iterable(range(50)).shuffle(50)
    pairs = list(shuffled.zip(shuffled))
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(50))
    assert [a for a, _ in pairs] != [b for _, b in pairs]


@given(numbers=st.lists(st.integers(), max_size=30), sources=st.integers(1, 4), data=st.data())
def test_numbers_are_shared_in_any_order_of_drawing(
    numbers: list[int], sources: int, data: st.DataObject
) -> None:
    shared = SharedNumbers(iter(numbers), sources)
    iterators = [shared.of(n) for n in range(sources)]
    got: list[list[int]] = [[] for _ in iterators]
    for n in data.draw(st.lists(st.integers(0, sources - 1), max_size=40)):
        got[n] += islice(iterators[n], 1)
    for found, rest in zip(got, iterators, strict=True):
        assert [*found, *rest] == numbers


def test_numbers_are_shared_between_threads() -> None:
    def slow() -> Iterator[int]:
        for number in range(300):
            time.sleep(1e-4)  # lets another thread run in between
            yield number

    shared = SharedNumbers(slow(), 4)
    got: list[list[int]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda n=n: got[n].extend(shared.of(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [list(range(300))] * 4


def test_every_way_to_mix_is_as_likely() -> None:
    first, second = flows_of([2, 2])
    flow = first.mix(second)
    ways = Counter(tuple(n for n, _ in flow.at_pass(number)) for number in range(1800))
    assert len(ways) == 6
    assert 220 < min(ways.values()) <= max(ways.values()) < 380


def test_weights_say_how_often_a_flow_comes() -> None:
    first, second = flows_of([20_000, 20_000])
    items = list(islice(first.mix(second, weights=[1, 3]), 10_000))
    assert 2300 < sum(n == 0 for n, _ in items) < 2700


def test_flows_without_exact_lengths_are_mixed_by_weights() -> None:
    unknown = Flow.from_callable(lambda: range(5))
    with pytest.raises(UsageError, match="needs weights"):
        unknown.mix(unknown)
    flow = unknown.mix(Flow.from_iterable(range(3)), weights=[1, 1])
    assert sorted(flow) == [0, 0, 1, 1, 2, 2, 3, 4]
    assert flow.length == UNKNOWN


def test_an_endless_flow_may_be_mixed_in_by_weights() -> None:
    flow = Flow.from_iterable(range(3)).mix(Flow.from_iterable([9]).repeat(), weights=[1, 1])
    assert flow.length == INFINITE
    assert [item for item in islice(flow, 200) if item != 9] == [0, 1, 2]


def test_the_choices_stay_what_they_are() -> None:
    first, second = flows_of([6, 4])
    mixed = [n for n, _ in first.mix(second, seed=5).at_pass(1)]
    chosen = [n for n, _ in first.choose(second, weights=[2, 1], seed=5).at_pass(1)]
    assert mixed == [1, 1, 0, 1, 1, 0, 0, 0, 0, 0]
    assert chosen == [1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("flows", "chosen", "length"),
    [
        ([3, 4], None, at_most(7)),
        ([3, None], None, UNKNOWN),
        ([None, None], None, INFINITE),
        ([3, None], [0, 1], INFINITE),
        ([3, None], [1, 0], exact(3)),
        ([3], None, exact(3)),
    ],
    ids=str,
)
def test_how_many_are_chosen_is_said_as_far_as_it_is_known(flows: Any, chosen: Any, length: Any) -> None:
    nodes = tuple(Items(count) for count in flows)
    assert Choose(nodes, chosen, 0).length == length


def test_a_flow_is_chosen_as_often_as_its_weight_says() -> None:
    endless = [Flow.from_iterable([n]).repeat() for n in range(3)]
    flow = endless[0].choose(*endless[1:], weights=[0.2, 0, 0.8])
    found = Counter(islice(flow, 20_000))
    assert found[1] == 0
    assert 3700 < found[0] < 4300


@pytest.mark.parametrize("step", [Mix, Choose])
@pytest.mark.parametrize(
    "wrong", [(1,), (1, 1, 1), (-1, 1), (0, 0), (float("nan"), 1), (float("inf"), 1), ()]
)
def test_invalid_weights_are_refused(step: Any, wrong: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="weights"):
        step((Items(), Items()), wrong, 0)


def test_a_flow_of_weight_0_cannot_come_whole() -> None:
    with pytest.raises(UsageError, match="never drawn"):
        Mix((Items(), Items()), (1, 0), 0)


@given(chosen=st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_weights_become_whole_numbers_in_the_same_proportions(chosen: list[float]) -> None:
    whole = weights_of(chosen, len(chosen))
    assert all(isinstance(weight, int) for weight in whole)
    for one, weight in zip(chosen, whole, strict=True):
        for other, others in zip(chosen, whole, strict=True):
            assert one.as_integer_ratio()[0] * other.as_integer_ratio()[1] * others == (
                other.as_integer_ratio()[0] * one.as_integer_ratio()[1] * weight
            )


@given(whole=st.lists(st.integers(0, 10**30), min_size=1, max_size=6).filter(any))
def test_each_number_stands_for_its_share_of_all_words(whole: list[int]) -> None:
    total, before = sum(whole), 0
    for n, weight in enumerate(whole):
        first, after = -(-(before << 64) // total), -(-((before + weight) << 64) // total)
        if after > first:
            assert weighted_choice(whole, first) == weighted_choice(whole, after - 1) == n
        before += weight


def test_any_number_of_flows_has_randomness_of_its_own() -> None:
    one = Flow.from_iterable(range(5)).map(lambda x, rng: int(rng.integers(1 << 60)), random=True)
    found = list(one.concat(*[one] * 599))

    assert len(found) == len(set(found)) == 3000
