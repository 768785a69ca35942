"""The behaviour of every input: exact epochs, original errors, and closing in any state."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, LocalShuffle, SlotsHeld, TrainTransform
from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    DummyConstantInput,
    FeedInput,
    Input,
    QueueInput,
    StagingInput,
    TensorInput,
    original_errors,
    to_dataset,
)
from support.loaded import assert_same, epoch_of
from support.loader_workers import OwnError, Tagging, fail
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import (
    FED,
    MEMBERS,
    TIMEOUT_S,
    WAYS,
    WHOLE,
    Made,
    Numbered,
    Rows,
    Stop,
    arrays,
    assert_whole,
    first,
    forever,
    gather,
    members,
    numbers_of,
    stepping,
    until_the_end,
    woken_by_closing,
)

Pair = namedtuple("Pair", ["image", "label"])


def made(make: Made, source: Any, *, rows: int = 3, **options: Any) -> Input:
    """The input over a source of batches; an input that makes batches gets ``rows``."""
    return make(source, **({"rows": rows} if make is MEMBERS["batch-queue"] else {}), **options)


@pytest.fixture(scope="module")
def loader(lmdb_shards: Path) -> Iterator[Loader]:
    """A loader of 204 records in batches of 30, the last of 24, for all tests, which set its epoch."""
    with Loader(
        lmdb_shards,
        batch_size=30,
        transform=Tagging(),
        shuffle=LocalShuffle(60),
        workers=1,
        with_numbers=True,
        drop_last=False,
        slots=12,
    ) as made:
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
                assert sorted(numbers_of(got)) == list(range(204))


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


def compute() -> Any:
    return (tf.random.uniform([2]),)


def test_computed_batches_have_no_end_without_a_length() -> None:
    with TensorInput(compute) as each:
        assert len(until_the_end(stepping(each), 10)) == 10
        assert len(until_the_end(each.dequeue, 10)) == 10


def test_computed_batches_end_where_two_ways_are_mixed() -> None:
    with TensorInput(compute, length=3) as each:
        step = stepping(each)
        step()
        assert len(list(each)) == 3
        assert len(until_the_end(step, 10)) == 2
        each.close()
        assert until_the_end(step, 10) == []


def test_a_dataset_gives_the_loaders_epochs(loader: Loader, epochs: list[Any]) -> None:
    loader.set_epoch(0)
    dataset = to_dataset(loader)

    assert dataset.element_spec == (
        tf.TensorSpec([None], tf.uint32),
        tf.TensorSpec([None, 2], tf.float64),
        *[tf.TensorSpec([None], tf.int64)] * 3,
    )
    assert dataset.cardinality() == len(loader) == 7
    for expected in epochs:
        assert_same([arrays(batch) for batch in dataset], expected)
        loader.receipt().check(204)


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
            assert numbers_of(first(each, step)) == source.numbers()[: step * 3]
            assert_whole(source, [arrays(batch) for batch in each])
        first(each, 1)


@pytest.mark.torture
@members(FED)
@settings(max_examples=8, deadline=None)
@given(steps=st.lists(st.integers(0, 5), max_size=3))
def test_a_step_in_a_graph_may_leave_an_epoch_too(make: Made, steps: list[int]) -> None:
    source = Numbered()
    with made(make, source) as each:
        step = stepping(each)
        for count in steps:
            assert numbers_of(until_the_end(step, count)) == source.numbers()[: count * 3]
            each.reset()  # type: ignore[attr-defined]
            assert_whole(source, until_the_end(step))
        assert_whole(source, until_the_end(step))


@members(quick=("staging-over-queue",))
def test_ways_may_be_mixed(make: Made) -> None:
    source = Numbered()
    with made(make, source) as each:
        for way in ("iteration", "dataset", "eager dequeue", "tf.function", "iteration", "dataset"):
            assert_whole(source, WAYS[way](each)())


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


def fail_at(step: int) -> Any:
    def before(current: int) -> None:
        if current == step:
            raise OwnError(f"at {step}")

    return before


@members()
def test_an_error_comes_in_python_as_itself_after_all_batches_before_it(make: Made) -> None:
    source = Numbered(before=fail_at(4))
    with made(make, source) as each:
        for way in ("iteration", "eager dequeue", "iteration"):
            got: list[Any] = []
            with pytest.raises(OwnError) as caught:
                gather(each if way == "iteration" else forever(each.dequeue), got)
            assert numbers_of(got) == list(range(12))
            assert "in before" in "".join(traceback.format_tb(caught.value.__traceback__))
        source.before = lambda step: None
        assert_whole(source, [arrays(batch) for batch in each])


@pytest.mark.parametrize("way", ["tf.function", "dataset"])
@members()
def test_an_error_comes_out_of_tensorflow_as_itself(make: Made, way: str) -> None:
    source = Numbered(before=fail_at(4))
    with made(make, source) as each:
        step = stepping(each) if way == "tf.function" else None
        for _ in range(
            1 if isinstance(each, DatasetInput) else 2
        ):  # its epoch continues after an error, to its end
            got: list[Any] = []
            with pytest.raises(OwnError, match="at 4") as caught, original_errors():
                gather(forever(step) if step else each.to_dataset(), got)
            assert numbers_of(got) == list(range(12))
            assert isinstance(caught.value.__cause__, tf.errors.OpError)
            assert "at 4" in str(caught.value.__cause__)
            assert "in before" in "".join(traceback.format_tb(caught.value.__traceback__))


@members()
def test_an_error_of_a_transform_comes_with_its_record(make: Made, lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=10, transform=Tagging(), workers=0, with_numbers=True, shuffle=None
    ) as sound:
        key = sound.key(57)
    with (
        Loader(
            lmdb_shards, batch_size=10, transform=Tagging({key: fail}), workers=0, with_numbers=True
        ) as loader,
        make(loader) as each,
    ):
        got: list[Any] = []
        with pytest.raises(OwnError) as caught:
            gather(each, got)

    assert numbers_of(got) == list(range(50))
    assert any(key in note for note in caught.value.__notes__)


@members()
def test_a_source_that_exits_is_an_error_of_the_step(make: Made) -> None:
    def leave(step: int) -> None:
        if step == 1:
            raise SystemExit(7)

    with made(make, Numbered(before=leave)) as each, pytest.raises(SystemExit):
        for _ in each:
            pass


@members()
def test_a_step_that_fails_leaves_nothing_behind(make: Made) -> None:
    def train() -> None:
        with make(Numbered(batches=100, last=3)) as each:
            for _ in each:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


@members()
def test_a_compiled_step_that_fails_may_be_repeated(make: Made) -> None:
    source = Numbered()
    with made(make, source) as each:

        @tf.function
        def step(bad: Any) -> Any:
            values, numbers = each.dequeue()
            tf.debugging.assert_less(numbers[0], bad)
            return values, numbers

        with pytest.raises(tf.errors.InvalidArgumentError):
            until_the_end(lambda: step(tf.constant(6, tf.int64)))
        rest = until_the_end(lambda: step(tf.constant(100, tf.int64)))
        assert numbers_of(rest) == source.numbers()[9:]
        assert_whole(source, until_the_end(lambda: step(tf.constant(100, tf.int64))))


@members(quick=("staging-over-queue",))
def test_it_may_be_closed_twice_in_any_state_and_not_used_after(make: Made) -> None:
    for uses in ("none", "one", "all", "graph", "dataset"):
        closed_twice(make, uses)


def closed_twice(make: Made, uses: str) -> None:
    each = make(Numbered(batches=50, last=3))
    if uses == "one":
        next(iter(each))
        each.dequeue()
    elif uses == "all":
        assert len(list(each)) > 10
    elif uses == "graph":
        stepping(each)()
    elif uses == "dataset":
        dataset = each.to_dataset()
        next(iter(dataset))

    each.close()
    each.close()

    with pytest.raises(UsageError, match="closed"):
        iter(each).__next__()
    with pytest.raises(UsageError, match="closed"):
        each.dequeue()
    if uses == "dataset" and not isinstance(each, DatasetInput):
        with pytest.raises(UsageError, match="closed"), original_errors():
            next(iter(dataset))
    assert each.stats().name == type(each).__name__
    assert each.stats().level == 0 or isinstance(each, StagingInput)


@members()
def test_closing_in_the_middle_ends_an_iteration(make: Made) -> None:
    each = make(Numbered(batches=50, last=3))
    with pytest.raises(UsageError, match="closed"):
        gather((each.close() or batch for batch in each), [])


@pytest.mark.parametrize("way", ["iteration", "graph"])
@members(FED)
def test_a_waiting_step_is_woken_by_closing(make: Made, way: str) -> None:
    stop = Stop()
    each = made(make, stop.source())
    error = woken_by_closing(each, stepping(each) if way == "graph" else each.dequeue, stop)

    assert isinstance(error, tf.errors.OutOfRangeError if way == "graph" else UsageError)


@members(FED)
def test_closing_stops_a_feeder_that_waits_for_room(make: Made) -> None:
    source = Numbered(batches=1000, last=3)
    each = made(make, source)
    iterator = iter(each)
    next(iterator)
    deadline = time.monotonic() + TIMEOUT_S
    while each.stats().level < each.stats().capacity and time.monotonic() < deadline:
        time.sleep(0.01)

    each.close()

    assert not [t for t in threading.enumerate() if t.name == "shardprep-feeder"]


@members()
def test_it_may_be_closed_after_its_loader(make: Made, lmdb_shards: Path) -> None:
    loader = Loader(lmdb_shards, batch_size=10, transform=TrainTransform(8), workers=0)
    with made(make, loader, rows=10) as each:
        next(iter(each))
        loader.close()


@members(quick=("staging-over-queue",))
def test_a_loader_that_is_closed_meanwhile_is_an_error_of_the_step(make: Made, lmdb_shards: Path) -> None:
    loader = Loader(lmdb_shards, batch_size=5, transform=TrainTransform(8), workers=1)
    with made(make, loader, rows=5) as each:
        with pytest.raises(Exception, match="closed"):  # noqa: PT012 - whichever notices first
            for _ in each:
                loader.close()
        with pytest.raises(UsageError, match="closed"):
            for _ in each:
                pass


@members()
def test_what_is_dropped_ends_its_thread(make: Made) -> None:
    each = make(Numbered(batches=50, last=3))
    next(iter(each))
    del each
    gc.collect()

    assert not [t for t in threading.enumerate() if t.name == "shardprep-feeder"]


@members(quick=("staging-over-queue",))
def test_what_is_dropped_after_an_error_ends_its_thread(make: Made) -> None:
    for way in WAYS.values():
        each = made(make, Numbered(before=fail_at(2)))
        whole_epoch = way(each)
        with suppress(OwnError), original_errors():
            whole_epoch()
        del each, whole_epoch
        gc.collect()

        assert not [t for t in threading.enumerate() if t.name == "shardprep-feeder"]


FORMS: dict[str, Any] = {
    "array": lambda n: np.full((2, 3), n, np.float32),
    "tuple": lambda n: (np.full((2, 3), n, np.uint8), np.array([n, n])),
    "list": lambda n: [np.full((2, 3), n, np.uint8), np.array([n, n])],
    "dict": lambda n: {"b": np.full((2, 3), n, np.float16), "a": np.array([n, n], np.int32)},
    "namedtuple": lambda n: Pair(np.full((2, 1), n, np.int8), np.array([n, n], np.uint64)),
    "nested": lambda n: ({"x": np.full(2, n, np.float64), "y": (np.array([n, n]),)}, np.array([True, False])),
    "strings": lambda n: ([b"a" * n, b"\0\xff"], np.array([n, n])),
    "scalars": lambda n: (np.float32(n), n, np.array(n)),
    "complex": lambda n: np.full((2, 2), n, np.complex64),
    "empty": lambda n: (np.zeros((0, 4), np.float32), np.zeros(0, np.int64)),
    "tensors": lambda n: (tf.fill([2, 2], float(n)), tf.constant([n, n])),
}


@members(WHOLE, quick=("staging-over-queue",))
def test_batches_keep_their_form(make: Made) -> None:
    for form in FORMS:
        keeps_its_form(make, form)


def keeps_its_form(make: Made, form: str) -> None:
    batches = [FORMS[form](n) for n in range(3)]
    with make(batches) as each:
        for way in ("iteration", "tf.function", "dataset"):
            got = WAYS[way](each)()
            assert len(got) == 3
            for one, batch in zip(got, batches, strict=True):
                expected = tuple(batch) if isinstance(batch, list) else batch
                if form == "strings":
                    assert one[0].tolist() == expected[0]
                    expected = (one[0], expected[1])
                tf.nest.assert_same_structure(one, expected)
                assert type(one) is type(expected) or form == "scalars"
                for x, y in zip(tf.nest.flatten(one), tf.nest.flatten(expected), strict=True):
                    assert x.dtype == np.asarray(y).dtype
                    np.testing.assert_array_equal(x, y)


@members(WHOLE, quick=("staging-over-queue",))
def test_encoded_images_come_as_strings(make: Made, lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=50, workers=1) as loader, make(loader) as each:
        assert each.element_spec[0].is_compatible_with(tf.TensorSpec([50], tf.string))
        expected = epoch_of(loader)
        loader.set_epoch(0)
        for (images, labels), (strings, numbers) in zip(
            expected, [arrays(batch) for batch in each], strict=True
        ):
            assert images == strings.tolist()
            np.testing.assert_array_equal(labels, numbers)


@members()
def test_a_generator_has_one_epoch(make: Made) -> None:
    source = Numbered()
    generator = source() if make is not MEMBERS["batch-queue"] else (record for record in Rows(source, 3))
    with BatchQueueInput(generator, 3) if make is MEMBERS["batch-queue"] else make(generator) as each:
        assert_whole(source, [arrays(batch) for batch in each])
        with pytest.raises(UsageError, match="one pass"):
            list(each)
    assert source.passes == 1


@members(quick=("staging-over-queue",))
def test_an_empty_source_needs_a_signature(make: Made) -> None:
    with pytest.raises(UsageError, match="give a signature"):
        make([])
    with make([], signature=(tf.TensorSpec([None], tf.int64),)) as each:
        for way in WAYS.values():
            assert way(each)() == []


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
    "shape": ((np.zeros((2, 4), np.float32), np.array([0, 1])), r"float32 \[2, 4\].*\(None, 3\)"),
    "rank": ((np.zeros((2, 3, 1), np.float32), np.array([0, 1])), r"\[2, 3, 1\].*\(None, 3\)"),
    "parts": (GOOD[:1], "2 parts.*tuple of 1"),
    "more parts": ((*GOOD, 1), "2 parts.*tuple of 3"),
    "form": ({"x": GOOD[0], "y": GOOD[1]}, r"2 parts.*dict of \['x', 'y'\]"),
    "no tuple": (GOOD[0], "2 parts.*one ndarray"),
    "objects": ((np.full((2, 3), "x"), GOOD[1]), r"string|str|<U"),
    "ragged": (([[1.0], [2.0, 3.0]], GOOD[1]), "float32"),
    "None": ((None, GOOD[1]), "float32"),
}


@members(WHOLE, quick=("staging-over-queue",))
def test_a_batch_that_differs_from_the_signature_is_an_error_that_names_both(make: Made) -> None:
    for batch, message in WRONG.values():
        with make([GOOD, GOOD, batch, GOOD]) as each:
            got: list[Any] = []
            with pytest.raises(UsageError, match=message):
                gather(each, got)
            assert len(got) == 2


def test_a_dict_with_other_names_is_an_error_that_names_them() -> None:
    message = r"dict of \['x'\].*dict of \['y'\]"
    with QueueInput([{"x": GOOD[0]}, {"y": GOOD[0]}]) as each, pytest.raises(UsageError, match=message):
        list(each)


@members(WHOLE)
def test_what_is_no_source_or_no_signature_is_an_error_at_once(make: Made) -> None:
    for source in (None, 5, object()):
        with pytest.raises(UsageError, match="iterable"):
            make(source)
    for signature in (tf.float32, (tf.float32,), {"x": [2, 3]}, np.float32):
        with pytest.raises(UsageError, match="TensorSpec"):
            make([GOOD], signature=signature)


@members()
def test_its_length_is_the_next_epochs(make: Made, loader: Loader) -> None:
    loader.set_epoch(0)
    with made(make, loader, rows=30) as each:
        if make is MEMBERS["batch-queue"]:
            pytest.skip("rows of a loader have no length")
        assert len(each) == each.batches_per_epoch == 7
        assert each.to_dataset().cardinality() == 7
        assert sum(1 for _ in each) == 7
        first(each, 3)
        assert len(each) == 7


@members(WHOLE, quick=("staging-over-queue",))
def test_a_resumed_epoch_has_what_is_left_of_it(make: Made, loader: Loader, epochs: list[Any]) -> None:
    loader.set_epoch(0)
    first(to_dataset(loader, prefetch=0), 4)
    loader.load_state_dict(loader.state_dict())

    with make(loader) as each:
        if not isinstance(each, DatasetInput):
            assert (len(each), each.batches_per_epoch) == (3, None)
        dataset = each.to_dataset()
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
        assert_same([arrays(batch) for batch in dataset], epochs[0][4:])
        assert_same([arrays(batch) for batch in dataset], epochs[1])


@members()
def test_the_length_of_what_has_none_is_an_error(make: Made) -> None:
    with made(make, Numbered()) as each:
        assert each.batches_per_epoch is None
        with pytest.raises(TypeError):
            len(each)


@members(WHOLE)
def test_what_is_in_memory_tensorflow_cannot_use_is_copied(make: Made) -> None:
    raw = np.arange(1000, dtype=np.uint8)
    readonly = np.arange(64, dtype=np.float32)
    readonly.flags.writeable = False
    batches = [
        (
            raw[offset : offset + 256].view(np.int32) if offset % 4 == 0 else raw[offset : offset + 256],
            raw[::2],
            np.asfortranarray(np.arange(12.0).reshape(3, 4)),
            np.arange(6, dtype=">i4"),
            readonly,
        )
        for offset in (1, 3, 17, 33, 63, 65)
    ]
    expected = [tuple(part.copy() for part in batch) for batch in batches]
    with make(batches) as each:
        got = list(each)
        for batch in batches:
            for part in batch:
                if part.flags.writeable:
                    part[...] = 0
        for tensors, parts in zip(got, expected, strict=True):
            for tensor, part in zip(tensors, parts, strict=True):
                np.testing.assert_array_equal(np.array(tensor), part)


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
            assert numbers_of(again) == numbers_of(expected)  # in the order of storage
        assert loader.stats().copied > 0
        assert_same([arrays(batch) for batch in held], expected)


@members(WHOLE, quick=("staging-over-queue",))
def test_batches_of_a_loader_are_not_copied(make: Made, lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=10, transform=TrainTransform(16), workers=1) as loader:
        ring = np.frombuffer(loader.engine._ring._map, np.uint8)  # type: ignore[union-attr]
        begins, size = ring.ctypes.data, ring.nbytes
        del ring
        with make(loader) as each:
            for images, _ in each:
                address = np.frombuffer(memoryview(images), np.uint8).ctypes.data
                assert begins <= address < begins + size
                assert address % 64 == 0
            del images
        assert loader.stats().copied == 0


def test_inputs_may_be_nested_and_close_one_another() -> None:
    source = Numbered()
    inner: Input = QueueInput(source)
    with StagingInput(StagingInput(inner), depth=2) as each:
        for _ in range(2):
            assert_whole(source, [arrays(batch) for batch in each])
        assert each.stats().source.source.name == "QueueInput"  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="closed"):
        iter(inner)


def test_two_inputs_may_share_a_step() -> None:
    one, other = Numbered(), Numbered(batches=4, last=2)
    with QueueInput(one) as left, FeedInput(other) as right:

        @tf.function
        def step() -> Any:
            return left.dequeue(), right.dequeue()

        pairs = [tf.nest.map_structure(np.array, step()) for _ in range(4)]
        assert numbers_of([left for left, _ in pairs]) == list(range(12))
        assert numbers_of([right for _, right in pairs]) == other.numbers()
