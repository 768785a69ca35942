"""The loader's batches as JAX arrays, without copies where the loader's memory can be used."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow, TrainTransform
from support.flow_functions import named, pair, pair_but_17
from support.loaded import Kept, assert_exactly_once, assert_same, crops_on, epoch_of
from support.loader_workers import OwnError, Tagging, fail

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from shardprep.loaders.jax_data import to_jax  # noqa: E402

ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have memory of their own")


def arrays_of(batches: Any, steps: int | None = None) -> list[Kept]:
    """Copy arrays to numpy."""
    return epoch_of((tuple(np.array(part) for part in batch) for batch in batches), steps)


def as_jax_has_it(batches: list[Kept]) -> list[Kept]:
    """Convert labels and numbers to the width that JAX has without jax_enable_x64."""
    return [(images, *(part.astype(np.int32) for part in rest)) for images, *rest in batches]


def span(array: Any) -> set[int]:
    """The addresses of an array's bytes, by 64."""
    start = array.unsafe_buffer_pointer()
    return set(range(start // 64, (start + array.nbytes) // 64))


@pytest.fixture
def whole(lmdb_shards: Path) -> list[Kept]:
    """Epochs 0 and 1 in numpy."""
    with crops_on(lmdb_shards) as loader:
        return epoch_of(loader) + epoch_of(loader)


def test_bits_of_bfloat16_are_viewed_as_jax_s(lmdb_shards: Path) -> None:
    exact, rounded = (
        next(iter(to_jax(crops_on(lmdb_shards, workers=0, transform=TrainTransform(8, dtype=dtype)))))[0]
        for dtype in ("float32", "bfloat16")
    )

    assert (rounded.view(jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()


def test_two_epochs_are_those_of_the_loader_bit_for_bit(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards) as loader:
        batches, epochs = to_jax(loader), []
        for _ in range(2):
            assert len(batches) == 21
            epochs.append(arrays_of(batches))
            assert_exactly_once(loader, epochs[-1])
            assert len(epochs[-1][-1][0]) == 4

    assert_same(epochs[0] + epochs[1], as_jax_has_it(whole))


def test_with_x64_labels_stay_int64(lmdb_shards: Path, whole: list[Kept]) -> None:
    with jax.enable_x64(True), crops_on(lmdb_shards) as loader:
        assert_same(arrays_of(to_jax(loader)), whole[:21])


def test_leaving_early_is_followed_by_a_whole_epoch(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards) as loader:
        batches = to_jax(loader)
        for _ in batches:
            break
        epoch = arrays_of(batches)
        assert_exactly_once(loader, epoch)

    assert_same(epoch, as_jax_has_it(whole[21:]))


def test_a_slot_stays_lent_while_a_jax_array_on_it_lives(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, slots=6) as loader:
        batches = to_jax(loader)
        for images, *_ in batches:
            held, expected = images, np.array(images)
            break
        del images, _
        for _ in range(3):
            for images, *_ in batches:
                assert not span(held) & span(images)
                assert (np.asarray(held) == expected).all()


@ON_CPU
def test_a_slot_comes_back_when_its_jax_array_is_dropped(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, slots=5) as loader:
        places = {images.unsafe_buffer_pointer() for _ in range(4) for images, *_ in to_jax(loader)}

    assert len(places) <= 5


@jax.jit
def long_sum(images: Any) -> Any:
    """A computation that reads the batch repeatedly, each time differently."""
    pixels = images.astype(jnp.uint32)
    return jax.lax.fori_loop(
        0, 50, lambda i, total: total * 31 + (pixels * (total + i)).sum(dtype=jnp.uint32), jnp.uint32(1)
    )


def long_sum_in_numpy(images: Any) -> int:
    pixels = images.astype(np.uint32)
    total = 1
    for i in range(50):
        total = (total * 31 + int((pixels * np.uint32((total + i) % 2**32)).sum(dtype=np.uint32))) % 2**32
    return total


@pytest.mark.filterwarnings("ignore::shardprep.loaders.SlotsHeld")  # steps that wait hold their batches
def test_a_computation_under_way_reads_its_own_batch(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards, slots=6) as loader:
        sums = [long_sum(images) for _ in range(2) for images, *_ in to_jax(loader)]

    assert [int(total) for total in sums] == [long_sum_in_numpy(images) for images, *_ in whole]


def test_a_donated_batch_leaves_the_loaders_alone(lmdb_shards: Path, whole: list[Kept]) -> None:
    inverted = jax.jit(lambda images: 255 - images, donate_argnums=0)
    with crops_on(lmdb_shards) as loader:
        for (images, *_), (expected, *_) in zip(to_jax(loader), whole, strict=False):
            assert (np.array(inverted(images)) == 255 - expected).all()


@ON_CPU
def test_on_cpu_what_starts_on_64_bytes_is_not_copied(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards) as loader:
        for batch in loader:
            ((images, labels, _),) = to_jax([batch])
            assert images.unsafe_buffer_pointer() == batch[0].ctypes.data
            assert labels.dtype == np.int32


def test_an_error_of_the_loader_comes_as_itself(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards) as loader:
        key = loader.key(100)
    with (
        crops_on(lmdb_shards, transform=Tagging({key: fail})) as loader,
        pytest.raises(OwnError, match="this one not"),
    ):
        for _ in to_jax(loader):
            pass


def test_a_resumed_loader_has_the_length_that_is_left(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards) as loader:
        some = arrays_of(to_jax(loader), 8)
        state = loader.state_dict()
    with crops_on(lmdb_shards) as loader:
        loader.load_state_dict(state)
        batches = to_jax(loader)
        assert len(batches) == 13
        some += arrays_of(batches)
        assert len(batches) == 21

    assert_same(some, as_jax_has_it(whole[:21]))


NUMBERS = Flow.from_iterable(range(23)).shuffle(9, seed=1)


def test_two_epochs_of_a_flow_are_its_first_two_passes_bit_for_bit() -> None:
    with NUMBERS.map(pair, random=True, processes=1).batch(5) as flow:
        batches = to_jax(flow)
        for number in range(2):
            expected = NUMBERS.map(pair, random=True).batch(5).at_pass(number)
            assert len(batches) == 5
            assert_same(arrays_of(batches), as_jax_has_it(list(expected)))


def test_a_padded_flow_of_dicts_keeps_its_names_and_mask() -> None:
    got = list(to_jax(NUMBERS.map(named, random=True).batch(5, remainder="pad")))

    assert [list(batch) for batch in got] == [["values", "number", "mask"]] * 5
    assert jnp.concatenate([batch["mask"] for batch in got]).tolist() == [True] * 23 + [False] * 2


@ON_CPU
def test_batches_of_a_flow_are_not_copied() -> None:
    made: list[int] = []
    flow = (
        NUMBERS.map(pair, random=True).batch(5).filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    )

    assert [values.unsafe_buffer_pointer() for values, _ in to_jax(flow)] == made
    with pytest.raises(TypeError):
        len(to_jax(flow))


def test_an_error_of_a_flows_map_comes_as_itself_after_the_batches_before_it() -> None:
    batches = to_jax(Flow.from_iterable(range(23)).map(pair_but_17, threads=2).batch(5))
    for _ in range(2):
        got: list[int] = []
        with pytest.raises(OwnError, match="this one not"):
            got.extend(int(number) for _, numbers in batches for number in numbers)
        assert got == list(range(15))


Point = namedtuple("Point", ["x", "y"])


def test_the_form_of_a_batch_is_kept() -> None:
    x, text, thing = np.zeros((2, 3), np.float32), np.array(["a"]), object()
    batch = {"point": Point(x, (x,)), "list": [b"bytes", "text", x], "text": text, "thing": thing}

    (got,) = to_jax([batch])

    assert list(got) == list(batch)
    assert isinstance(got["point"], Point)
    assert isinstance(got["point"].y[0], jax.Array)
    assert got["list"][:2] == [b"bytes", "text"]
    assert isinstance(got["list"][2], jax.Array)
    assert got["text"] is text
    assert got["thing"] is thing


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype=">i8"),
        np.arange(6)[::-1],
        np.arange(12.0).reshape(3, 4).T,
        np.array([2**31 - 1, -(2**31)]),
        np.array([2**32 - 1], np.uint64),
        np.array(3.5),
        np.array([1 + 2j]),
        np.array([True, False]),
    ],
)
def test_numbers_of_any_layout_keep_their_values(array: np.ndarray[Any, Any]) -> None:
    (made,) = to_jax([array])

    assert made.tolist() == array.tolist()


@pytest.mark.parametrize("number", [np.array([2**31]), np.array([-(2**40)]), np.array([2**32], np.uint64)])
def test_an_integer_that_jax_would_cut_is_an_error(number: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match="jax_enable_x64"):
        list(to_jax([number]))
    with jax.enable_x64(True):
        assert [made.tolist() for made in to_jax([number])] == [number.tolist()]


def test_the_device_is_the_one_asked_for() -> None:
    device = jax.devices()[-1]

    (made,) = to_jax([np.zeros(3, np.float32)], device=device)

    assert made.devices() == {device}
    assert made.committed


def test_a_function_gives_an_epoch_each_time_and_no_length() -> None:
    batches = to_jax(lambda: (np.full(2, n) for n in range(3)))

    for _ in range(2):
        assert [int(batch[0]) for batch in batches] == [0, 1, 2]
    with pytest.raises(TypeError):
        len(batches)
