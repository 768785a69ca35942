"""The loader's batches as JAX arrays, without copies where the loader's memory can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import TrainTransform
from support.loaded import crops_on, epoch_of

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from shardprep.loaders.jax_data import to_jax  # noqa: E402


def test_bits_of_bfloat16_are_viewed_as_jax_s(lmdb_shards: Path) -> None:
    exact, rounded = (
        next(iter(to_jax(crops_on(lmdb_shards, workers=0, transform=TrainTransform(8, dtype=dtype)))))[0]
        for dtype in ("float32", "bfloat16")
    )

    assert (rounded.view(jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()

    batches = to_jax(crops_on(lmdb_shards, workers=0, transform=lambda *_: np.ones(2, jnp.bfloat16)))
    assert next(iter(batches))[0][0].dtype == jnp.bfloat16


@jax.jit
def long_sum(images: Any) -> Any:
    """A computation that reads the batch repeatedly, each time differently."""
    pixels = images.astype(jnp.uint32)
    return jax.lax.fori_loop(
        0, 50, lambda i, total: total * 31 + (pixels * (total + i)).sum(dtype=jnp.uint32), jnp.uint32(1)
    )


@pytest.mark.filterwarnings("ignore::shardprep.loaders.SlotsHeld")  # steps that wait hold their batches
def test_a_computation_under_way_reads_its_own_batch(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards) as loader:
        whole = epoch_of(loader) + epoch_of(loader)
    with crops_on(lmdb_shards, slots=6) as loader:
        sums = [long_sum(images) for _ in range(2) for images, *_ in to_jax(loader)]

    assert [int(total) for total in sums] == [int(long_sum(images)) for images, *_ in whole]


def test_a_donated_batch_leaves_the_loaders_alone_and_with_x64_labels_stay_int64(lmdb_shards: Path) -> None:
    inverted = jax.jit(lambda images: 255 - images, donate_argnums=0)
    with jax.enable_x64(True), crops_on(lmdb_shards) as loader, crops_on(lmdb_shards) as other:
        for (images, labels, _), (expected, numbers, _) in zip(to_jax(loader), other, strict=True):
            assert (np.array(inverted(images)) == 255 - expected).all()
            assert (labels.dtype, labels.tolist()) == (np.int64, numbers.tolist())


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
        np.array([1.5], jnp.bfloat16),
    ],
)
def test_numbers_of_any_layout_keep_their_values(array: np.ndarray[Any, Any]) -> None:
    (made,) = to_jax([array])

    assert isinstance(made, jax.Array)
    assert made.tolist() == array.tolist()


@pytest.mark.parametrize("number", [np.array([2**31]), np.array([-(2**40)]), np.array([2**32], np.uint64)])
def test_an_integer_that_jax_would_cut_is_an_error(number: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match="jax_enable_x64"):
        list(to_jax([number]))
    with jax.enable_x64(True):
        assert [made.tolist() for made in to_jax([number])] == [number.tolist()]


def test_the_device_is_the_one_asked_for() -> None:
    (made,) = to_jax([np.zeros(3, np.float32)], device=jax.devices()[-1])
    assert (made.devices(), made.committed) == ({jax.devices()[-1]}, True)
