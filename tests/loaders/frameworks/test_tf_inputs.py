"""The behaviour of every input: exact epochs, original errors, and closing in any state."""

import gc
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow, Loader, SlotsHeld, TrainTransform
from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    DummyConstantInput,
    FeedInput,
    Input,
    QueueInput,
    StagingInput,
    TensorInput,
)
from support.flow_functions import named, pair
from support.loaded import assert_same, epoch_of, loader_on, numbers_in
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import (
    FED,
    MEMBERS,
    WAYS,
    WHOLE,
    Made,
    Numbered,
    Rows,
    arrays,
    assert_same_form,
    assert_whole,
    first,
    members,
    stepping,
    until_the_end,
)
from support.waiting import until

Pair = namedtuple("Pair", ["image", "label"])


def made(make: Made, source: Any, *, rows: int = 3, **options: Any) -> Input:
    """The input over a source of batches; an input that makes batches gets ``rows``."""
    return make(source, **({"rows": rows} if make is MEMBERS["batch-queue"] else {}), **options)


@pytest.fixture(scope="module")
def loader(lmdb_shards: Path) -> Iterator[Loader]:
    """A loader of 204 records in batches of 30, the last of 24, for all tests, which set its epoch."""
    with loader_on(lmdb_shards, batch_size=30, workers=1, slots=12, read_ahead=0) as made:
        yield made


@pytest.fixture(scope="module")
def epochs(loader: Loader) -> list[list[Any]]:
    """The loader's first three epochs."""
    loader.set_epoch(0)
    return [epoch_of(loader) for _ in range(3)]


@members(quick=("queue", "staging-2", "dataset"))
def test_three_epochs_are_the_loaders_bit_for_bit_in_every_way(
    make: Made, loader: Loader, epochs: list[Any]
) -> None:
    for way in WAYS.values():
        loader.set_epoch(0)
        with made(make, loader, rows=30) as each:
            whole_epoch = way(each)
            for expected in epochs:
                got = whole_epoch()
                assert_same(got, expected)
                assert [len(batch[-1]) for batch in got] == [30] * 6 + [24]
                assert sorted(numbers_in(got)) == list(range(204))


@pytest.mark.parametrize("staged", torture_except([False, True], True))
@pytest.mark.parametrize("length", [0, 3])
def test_computed_batches_end_in_every_way(length: int, staged: bool) -> None:
    signature = (tf.TensorSpec([2], tf.float32),)
    for make in (
        lambda: TensorInput(compute, length=length),
        lambda: DummyConstantInput(signature, length=length),
    ):
        for way in WAYS.values():
            with StagingInput(make()) if staged else make() as each:
                whole_epoch = way(each)
                for _ in range(3):
                    assert len(whole_epoch()) == length

    with TensorInput(compute) as each:  # without a length they have no end
        assert len(until_the_end(each.dequeue, 10)) == 10


def compute() -> Any:
    return (tf.random.uniform([2]),)


@members(quick=("batch-queue", "staging-over-queue"))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_after_leaving_at_any_step_the_next_epoch_is_whole(make: Made, data: st.DataObject) -> None:
    source = Numbered(batches=data.draw(st.integers(1, 6)))
    options: dict[str, Any] = {}
    if make in (MEMBERS["queue"], MEMBERS["batch-queue"]):
        options["capacity"] = data.draw(st.integers(1, 8))
    with made(make, source, **options) as each:
        for step in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)):
            assert numbers_in(first(each, step)) == source.numbers()[: step * 3]
            assert_whole(source, [arrays(batch) for batch in each])
        first(each, 1)


@members()
def test_a_new_iteration_ends_the_one_before(make: Made) -> None:
    source = Numbered()
    with made(make, source) as each:
        if isinstance(each, DatasetInput):
            pytest.skip("tf.data's iterators are told that their data ended")
        old = iter(each)
        next(old)
        new = iter(each)
        got = [arrays(next(new))]

        with pytest.raises(UsageError, match="another iteration"):
            next(old)

        assert_whole(source, got + [arrays(batch) for batch in new])


@members()
def test_what_is_closed_or_dropped_in_the_middle_ends_its_iteration_and_its_thread(make: Made) -> None:
    each = make(Numbered(batches=50, last=3))
    with pytest.raises(UsageError, match="closed"):
        [each.close() for _ in each]
    dropped = make(Numbered(batches=50, last=3))
    next(iter(dropped))
    del dropped
    gc.collect()

    assert not [t for t in threading.enumerate() if t.name == "shardprep-feeder"]


@members(FED)
def test_closing_stops_a_feeder_that_waits_for_room(make: Made) -> None:
    each = made(make, Numbered(batches=1000, last=3))
    step = stepping(each)
    step()
    until(lambda: each.stats().level == each.stats().capacity)

    each.close()
    with pytest.raises(tf.errors.OpError, match="this input is closed"):
        step()

    assert not [t for t in threading.enumerate() if t.name == "shardprep-feeder"]


@members(quick=("staging-over-queue",))
def test_a_loader_that_is_closed_meanwhile_is_an_error_of_the_step(make: Made, lmdb_shards: Path) -> None:
    loader = Loader(lmdb_shards, batch_size=5, transform=TrainTransform(8), workers=1, slots=16)
    with made(make, loader, rows=5) as each:
        with pytest.raises(Exception, match="closed"):  # noqa: PT012 - whichever notices first
            for _ in each:
                loader.close()
        with pytest.raises(UsageError, match="closed"):
            for _ in each:
                pass


FORMS: dict[str, Any] = {
    "array": lambda n: np.full((2, 3), n, np.float32),
    "tuple": lambda n: (np.full((2, 3), n, np.uint8), np.array([n, n])),
    "list": lambda n: [np.full((2, 3), n, np.uint8), np.array([n, n])],
    "dict": lambda n: {"b": np.full((2, 3), n, np.float16), "a": np.array([n, n], np.int32)},
    "namedtuple": lambda n: Pair(np.full((2, 1), n, np.int8), np.array([n, n], np.uint64)),
    "nested": lambda n: ({"x": np.full(2, n, np.float64), "y": (np.array([n, n]),)}, np.array([True, False])),
    "strings": lambda n: ([b"a" * n, b"\0\xff"], np.array([n, n])),
    "scalars": lambda n: (np.float32(n), n, np.array(n)),
    "complex": lambda n: (np.full((2, 2), n, np.complex64), np.full(2, n, "float8_e4m3fn")),
    "empty": lambda n: (np.zeros((0, 4), np.float32), np.zeros(0, np.int64)),
    "tensors": lambda n: (tf.fill([2, 2], float(n)), tf.constant([n, n])),
}


@members(WHOLE, quick=("staging-over-queue",))
def test_batches_keep_their_form(make: Made) -> None:
    for form, batch_of in FORMS.items():
        batches = [batch_of(n) for n in range(3)]
        with make(batches) as each:
            for way in ("iteration", "tf.function", "dataset"):
                got = WAYS[way](each)()
                assert len(got) == 3
                for one, batch in zip(got, batches, strict=True):
                    expected = tuple(batch) if isinstance(batch, list) else batch
                    if form == "strings":
                        assert one[0].tolist() == expected[0]
                        expected = (one[0], expected[1])
                    assert type(one) is type(expected) or form == "scalars"
                    assert_same_form(one, expected)


def test_an_epoch_that_is_left_or_reset_ends_its_source() -> None:
    passes, source = list[Any](), Numbered()
    with FeedInput(lambda: passes.append(source()) or passes[-1]) as each:  # type: ignore[func-returns-value]
        first(each, 1)
        assert passes[0].gi_frame is None
        next(batches := iter(each))
        each.reset()
        assert [generator.gi_frame for generator in passes] == [None, None]
        with pytest.raises(UsageError, match="another iteration"):
            next(batches)


@members()
def test_a_generator_has_one_epoch(make: Made) -> None:
    source = Numbered()
    generator = source() if make is not MEMBERS["batch-queue"] else (record for record in Rows(source, 3))
    with BatchQueueInput(generator, 3) if make is MEMBERS["batch-queue"] else make(generator) as each:
        assert_whole(source, [arrays(batch) for batch in each])
        with pytest.raises(UsageError, match="one pass"):
            list(each)
    assert source.passes == 1


@members(WHOLE)
def test_a_signature_that_is_given_is_what_it_has(make: Made) -> None:
    signature = {"n": tf.TensorSpec([2], tf.int32)}
    with make([{"n": [1, 2]}, {"n": np.array([3, 4], np.int32)}], signature=signature) as each:
        assert each.element_spec == signature
        assert [batch["n"].tolist() for batch in map(arrays, each)] == [[1, 2], [3, 4]]
        assert each.to_dataset().element_spec == signature


GOOD = (np.zeros((2, 3), np.float32), np.array([0, 1]))
WRONG: dict[str, tuple[Any, str]] = {
    "dtype": ((np.zeros((2, 3)), np.array([0, 1])), r"float64 \[2, 3\].*float32"),
    "shape": ((np.zeros((2, 4), np.float32), np.array([0, 1])), r"first batch.*\(None, 3\)"),
    "rank": ((np.zeros((2, 3, 1), np.float32), np.array([0, 1])), r"\[2, 3, 1\].*\(None, 3\)"),
    "parts": (GOOD[:1], "2 parts.*tuple of 1"),
    "more parts": ((*GOOD, 1), "2 parts.*tuple of 3"),
    "form": ({"x": GOOD[0], "y": GOOD[1]}, r"2 parts.*dict of \['x', 'y'\]"),
    "no tuple": (GOOD[0], "2 parts.*one ndarray"),
    "objects": ((np.full((2, 3), "x"), GOOD[1]), r"string|str|<U"),
    "ragged": (([[1.0], [2.0, 3.0]], GOOD[1]), "list of 2 .*float32"),
    "None": ((None, GOOD[1]), "float32"),
    "masked": ((np.ma.zeros((2, 3), np.float32), GOOD[1]), "mask"),
}


@members(WHOLE, quick=("staging-over-queue",))
def test_a_batch_that_differs_from_the_signature_is_an_error_that_names_both(make: Made) -> None:
    for batch, message in WRONG.values():
        got: list[Any] = []
        with make([GOOD, GOOD, batch, GOOD]) as each, pytest.raises(UsageError, match=message):
            got.extend(map(arrays, each))
        assert len(got) == 2
    for batches, options, says in (
        ([{"x": GOOD[0]}, {"y": GOOD[0]}], {}, r"dict of \['x'\].*dict of \['y'\]"),
        ([{1: GOOD[0]}, {1: GOOD[0], "y": 0}], {}, r"dict of \['1'\].*dict of \['1', 'y'\]"),
        ([["a", b"b"], [1, 2]], {"signature": tf.TensorSpec([None], tf.string)}, "one int where .* string"),
    ):
        with make(batches, **options) as each, pytest.raises(UsageError, match=says):
            list(each)


@members(WHOLE, quick=("staging-over-queue",))
def test_what_the_step_holds_never_changes(make: Made, lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=10, transform=TrainTransform(16), workers=1, slots=3, with_numbers=True
    ) as loader:
        expected = epoch_of(loader)
        loader.set_epoch(0)
        with make(loader) as each:
            with pytest.warns(SlotsHeld):
                held = list(each)
            again = [arrays(batch) for batch in each]
            assert numbers_in(again) == numbers_in(expected)  # in the order of storage
        assert loader.stats().copied > 0
        assert_same([arrays(batch) for batch in held], expected)


def test_two_inputs_may_share_a_step() -> None:
    one, other = Numbered(), Numbered(batches=4, last=2)
    with QueueInput(one) as left, FeedInput(other) as right:
        step = tf.function(lambda: (left.dequeue(), right.dequeue()))
        pairs = [tf.nest.map_structure(np.array, step()) for _ in range(4)]
        assert numbers_in([left for left, _ in pairs]) == list(range(12))
        assert numbers_in([right for _, right in pairs]) == other.numbers()


NUMBERS = Flow.from_iterable(range(23)).shuffle(9, seed=1)
FLOWS: tuple[Callable[[], Flow], ...] = (
    lambda: NUMBERS.map(pair, random=True),
    lambda: NUMBERS.map(named, random=True),
    lambda: NUMBERS.map(pair, random=True, threads=2),
)


@members(quick=("queue", "batch-queue"))
def test_two_epochs_are_a_flows_first_two_passes_bit_for_bit(make: Made) -> None:
    for flow, way in zip(cycle(FLOWS), WAYS.values(), strict=False):
        makes_batches, items, reference = make is MEMBERS["batch-queue"], flow(), flow().batch(5)
        with BatchQueueInput(items, 5) if makes_batches else make(items.batch(5)) as each:
            assert len(each) == each.batches_per_epoch == 5  # type: ignore[attr-defined]
            whole_epoch = way(each)
            for number in range(2):
                for got, expected in zip(whole_epoch(), reference.at_pass(number), strict=True):
                    assert_same_form(got, expected)
        items.load_state_dict({**items.state_dict(), "items": 10})
        with BatchQueueInput(items, 5) as each:  # goes on where the flow is
            assert len(list(each)) == 3
    with BatchQueueInput(Flow.from_iterable([*range(7)]), 5, remainder="pad") as each:
        assert [mask.numpy().sum() for _, mask in each] == [5, 2]


def address_of(tensor: Any) -> int:
    return int(np.frombuffer(memoryview(tensor), np.uint8).ctypes.data)


@members(WHOLE, quick=("dataset",))
def test_batches_that_never_change_are_lent_without_a_copy(make: Made) -> None:
    made: list[int] = []
    flow = NUMBERS.map(pair, random=True).batch(5)
    flow = flow.filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    assert flow.batches_never_change

    with make(flow) as each:
        assert [address_of(values) for values, _ in each] == made
