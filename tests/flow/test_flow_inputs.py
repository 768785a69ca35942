"""A flow as the source of an input: exact passes, in its form, that leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Flow
from shardprep.loaders.batches.pickling import aligned
from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    Input,
    QueueInput,
    StagingInput,
    TensorInput,
    original_errors,
    to_dataset,
)
from support.flow_functions import OUTPUTS, named, pair, pair_but_17
from support.loader_workers import OwnError
from support.process_table import children
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import WAYS, WHOLE, Made, arrays, first, gather, members as members_of

COUNT, SIZE = 23, 5


def batch_queue(items: Flow, **options: Any) -> Input:
    return BatchQueueInput(items, SIZE, **options)


OF_BATCHES: dict[str, Made] = {
    name: WHOLE[name] for name in ("feed", "queue", "staging-2", "staging-over-queue", "dataset")
}
MEMBERS = OF_BATCHES | {"batch-queue": batch_queue}

members = members_of(MEMBERS, quick=("queue", "batch-queue"))
whole_batches = members_of(OF_BATCHES, quick=("dataset",))

numbers = Flow.from_iterable(range(COUNT))
shuffled = numbers.shuffle(9, seed=1)

HERE: dict[str, Callable[[], Flow]] = {
    "tuples": lambda: shuffled.map(pair, random=True),
    "dicts": lambda: shuffled.map(named, random=True),
    "threads": lambda: shuffled.map(pair, random=True, threads=2),
}
ELSEWHERE: dict[str, Callable[[], Flow]] = {
    "processes": lambda: shuffled.map(pair, random=True, processes=2),
    "processes with outputs": lambda: shuffled.map(pair, random=True, processes=2, outputs=OUTPUTS),
    "process": lambda: shuffled.map(pair, random=True).in_process(),
}
QUICK = {"queue": "processes with outputs"}


def source_for(make: Made, items: Flow) -> Flow:
    """The flow for the input: of batches, or of items for the input that makes batches."""
    return items if make is batch_queue else items.batch(SIZE)


def assert_same(got: list[Any], expected: list[Any]) -> None:
    """Check that both are equal bit for bit, with forms and dtypes."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        tf.nest.assert_same_structure(one, other)
        for x, y in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@members
def test_two_epochs_are_the_flows_first_two_passes_bit_for_bit(make: Made) -> None:
    for items, way in zip(cycle(HERE.values()), WAYS.values(), strict=False):
        reference = items().batch(SIZE)
        with make(source_for(make, items())) as each:
            assert len(each) == each.batches_per_epoch == 5  # type: ignore[attr-defined]
            whole_epoch = way(each)
            for number in range(2):
                assert_same(whole_epoch(), list(reference.at_pass(number)))


def from_elsewhere() -> Iterator[Any]:
    """Members with kinds of flows; all but one are torture tests."""
    for member, kind in product(MEMBERS, ELSEWHERE):
        marks = () if QUICK.get(member) == kind else pytest.mark.torture
        yield pytest.param(MEMBERS[member], ELSEWHERE[kind], id=f"{member}, {kind}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "items"), list(from_elsewhere()))
def test_two_epochs_from_other_processes_are_the_same(make: Made, items: Callable[[], Flow]) -> None:
    reference = HERE["tuples"]().batch(SIZE)
    with source_for(make, items()) as flow, make(flow) as each:
        for number in range(2):
            assert_same([arrays(batch) for batch in each], list(reference.at_pass(number)))


@members
def test_an_epoch_that_is_left_is_followed_by_a_whole_pass(make: Made) -> None:
    with make(source_for(make, HERE["threads"]())) as each:
        for steps in (1, 3):
            first(each, steps)
        left = [arrays(batch) for batch in each]

    assert_same(left, list(HERE["tuples"]().batch(SIZE).at_pass(2)))


UNKNOWN = {  # flows of unknown length, with their number of batches
    "a function": (Flow.from_callable(numbers.__iter__).map(np.int64), 5),
    "a filter": (numbers.filter(lambda number: number % 2).map(np.int64), 3),
    "dropped items": (numbers.map(lambda n: np.int64(n) if n < 10 else None, drop_none=True), 2),
}


@pytest.mark.slow
@members
def test_an_unknown_length_is_an_error_and_epochs_are_exact(make: Made) -> None:
    for items, batches in UNKNOWN.values():
        with make(source_for(make, items)) as each:
            with pytest.raises(TypeError):
                len(each)
            assert each.batches_per_epoch is None  # type: ignore[attr-defined]
            assert each.to_dataset().cardinality() == tf.data.UNKNOWN_CARDINALITY
            for _ in range(2):
                assert_same([arrays(batch) for batch in each], list(items.batch(SIZE)))
                assert len(list(each)) == batches


@members
def test_an_endless_flow_is_one_epoch(make: Made) -> None:
    items = shuffled.repeat().map(np.int64)
    with make(source_for(make, items)) as each:
        with pytest.raises(TypeError):
            len(each)
        assert_same(first(each, 7), list(items.batch(SIZE).take(7).at_pass(0)))
        assert_same(first(each, 7), list(items.batch(SIZE).take(7).at_pass(1)))


@pytest.mark.slow
@members
def test_an_error_of_a_map_comes_as_itself_and_tells_the_item(make: Made) -> None:
    for threads in (0, 2):
        with make(source_for(make, numbers.map(pair_but_17, threads=threads))) as each:
            for number in range(2):
                got: list[Any] = []
                with pytest.raises(OwnError, match="this one not") as caught:
                    gather(each, got)
                assert [batch[1].tolist() for batch in got] == [list(range(n, n + SIZE)) for n in (0, 5, 10)]
                assert f"item 17 of pass {number}, at map(pair_but_17)" in note_of(caught.value)
            with pytest.raises(OwnError), original_errors():
                list(each.to_dataset())


@pytest.mark.torture
def test_an_error_of_a_map_in_a_process_comes_as_itself_and_tells_the_item() -> None:
    flow = numbers.map(pair_but_17, processes=1).batch(SIZE)
    with flow, QueueInput(flow) as each, pytest.raises(OwnError, match="this one not") as caught:
        list(each)
    assert "item 17 of pass 0, at map(pair_but_17)" in note_of(caught.value)


def note_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@members
def test_an_error_in_the_first_batch_comes_when_its_form_is_asked_for(make: Made) -> None:
    with pytest.raises(OwnError):
        make(source_for(make, Flow.from_iterable(range(17, 20)).map(pair_but_17)))


def address_of(tensor: Any) -> int:
    return int(np.frombuffer(memoryview(tensor), np.uint8).ctypes.data)


@whole_batches
def test_batches_that_never_change_are_lent_without_a_copy(make: Made) -> None:
    made: list[int] = []
    flow = (
        shuffled.map(pair, random=True)
        .batch(SIZE)
        .filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    )
    assert flow.batches_never_change

    with make(flow) as each:
        assert [address_of(values) for values, _ in each] == made


@whole_batches
def test_batches_that_may_change_are_copied(make: Made) -> None:
    batch = aligned(32).view(np.float64)  # arrays that are not aligned would be copied in any case

    def counted(number: int) -> Any:
        batch[:] = number
        return batch

    flow = numbers.map(counted)
    assert not flow.batches_never_change
    with make(flow) as each:
        assert [int(tensor[0]) for tensor in list(each)] == list(range(COUNT))


@pytest.mark.slow
@whole_batches
@pytest.mark.parametrize("function", torture_except([pair, named], named))
def test_the_mask_of_a_padded_flow_arrives(make: Made, function: Callable[..., Any]) -> None:
    flow = numbers.map(function, random=True).batch(SIZE, remainder="pad")
    with make(flow) as each:
        for way in WAYS.values():
            got = way(each)()
            masks = [batch["mask"] if function is named else batch[-1] for batch in got]
            assert np.concatenate(masks).tolist() == [True] * COUNT + [False] * 2
            assert all(len(part) == SIZE for batch in got for part in tf.nest.flatten(batch))


@pytest.mark.slow
@whole_batches
def test_lists_of_bytes_words_and_numbers_are_one_part_each(make: Made) -> None:
    flow = numbers.map(lambda n: (b"x" * n, "y" * n, n)).batch(SIZE, as_list=True)
    with make(flow) as each:
        assert [spec.dtype for spec in each.element_spec] == [tf.string, tf.string, tf.int64]
        for way in WAYS.values():
            rows = [row for batch in way(each)() for row in zip(*batch, strict=True)]
            assert rows == [(b"x" * n, b"y" * n, n) for n in range(COUNT)]


@members
def test_closing_ends_the_pass_though_everything_is_still_held(make: Made) -> None:
    for steps in (None, 0, 2, 9):
        begun: list[bool] = []
        ended: list[bool] = []

        def begin(begun: list[bool] = begun, ended: list[bool] = ended) -> Iterator[int]:
            begun.append(True)
            try:
                yield from range(COUNT)
            finally:
                ended.append(True)

        flow = source_for(make, Flow.from_callable(begin).map(np.int64))
        each = make(flow)
        if steps is not None:
            first(each, steps)
        each.close()
        if isinstance(each, DatasetInput):  # the dataset may have other consumers
            del each
            gc.collect()

        assert len(begun) == len(ended) > 0


@pytest.mark.torture
@pytest.mark.parametrize("steps", torture_except([None, 2], 2))
def test_closing_input_and_flow_ends_the_workers_though_both_are_still_held(steps: int | None) -> None:
    before = children()
    flow = numbers.map(pair_but_17, processes=1).batch(SIZE)
    each = QueueInput(flow)
    if steps is not None:
        first(each, steps)
    each.close()
    flow.close()

    assert children() <= before


def test_to_dataset_has_the_flows_length_and_form() -> None:
    dataset = to_dataset(HERE["dicts"]().batch(SIZE))

    assert dataset.cardinality() == 5
    assert dataset.element_spec == {
        "values": tf.TensorSpec([None, 2, 3], tf.float32),
        "number": tf.TensorSpec([None], tf.int64),
    }


@pytest.mark.torture
def test_a_keras_model_trains_on_a_flow() -> None:
    flow = shuffled.map(pair, random=True).batch(SIZE).map(lambda batch: (batch[0], batch[1] % 2))
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(2)])
    model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    with QueueInput(flow) as batches:
        history = model.fit(batches.to_dataset(), epochs=2, shuffle=False, verbose=0)
        assert len(history.history["loss"]) == 2
        assert batches.stats().batches == 10


def test_what_tensorflow_makes_of_a_flow_may_be_an_input_again() -> None:
    """TensorInput calls its function once for each graph, so it takes a flow through another input."""
    items = shuffled.repeat().map(np.int64)
    with (
        QueueInput(items.batch(SIZE)) as batches,
        TensorInput(
            lambda: batches.dequeue() * 2, length=4, signature=tf.TensorSpec([SIZE], tf.int64)
        ) as doubled,
        StagingInput(doubled) as staged,
    ):
        got = [arrays(batch) for _ in range(2) for batch in staged]

    assert_same(got, [batch * 2 for batch in items.batch(SIZE).take(8)])
