"""The loader's batches as PyTorch tensors over the loader's memory, each record once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow, Loader, TrainTransform
from support.loaded import Kept, assert_same, crops_on, epoch_of
from support.loader_workers import Tagging

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from shardprep.loaders.torch_data import to_torch  # noqa: E402


def arrays_of(batches: Any, steps: int | None = None) -> list[Kept]:
    """Copy arrays, as a caller that keeps them would."""
    return epoch_of((tuple(part.numpy() for part in batch) for batch in batches), steps)


@pytest.mark.parametrize("options", [{"batch_size": 8}, {}, {"batch_size": 2, "collate_fn": list}])
def test_batches_of_batches_are_an_error_that_says_batch_size_none(
    lmdb_shards: Path, options: dict[str, Any]
) -> None:
    with crops_on(lmdb_shards, workers=0) as loader:
        batches = DataLoader(to_torch(loader), **options)
        with pytest.raises(UsageError, match="give the DataLoader batch_size=None"):
            iter(batches)
        assert loader.epoch == 0


def test_items_of_a_flow_may_be_batched_by_a_data_loader() -> None:
    items = Flow.from_iterable([np.full(3, n) for n in range(6)])

    batches = list(DataLoader(to_torch(items), batch_size=4))

    assert [batch.shape for batch in batches] == [(4, 3), (2, 3)]


def test_bits_of_bfloat16_are_viewed_as_torch_s(lmdb_shards: Path) -> None:
    exact, rounded = (
        next(iter(to_torch(crops_on(lmdb_shards, workers=0, transform=TrainTransform(8, dtype=dtype)))))[0]
        for dtype in ("float32", "bfloat16")
    )

    assert rounded.view(torch.bfloat16).equal(exact.to(torch.bfloat16))


def test_a_loaders_batches_are_not_copied(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, transform=Tagging()) as loader:
        source, seen = SourceThatNotes(loader), []
        for batch in DataLoader(to_torch(source), batch_size=None):
            seen.append([part.data_ptr() for part in batch])

    assert seen == source.addresses
    assert all(part[0] % 64 == 0 for part in seen)


class SourceThatNotes:
    """A source that notes the addresses of the arrays it delivers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.addresses: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        return map(self.noted, iter(self.loader))

    def noted(self, batch: Any) -> Any:
        self.addresses.append([part.ctypes.data for part in batch])
        return batch


@pytest.mark.filterwarnings(
    "ignore:os.fork",
    "ignore:This process .* is multi-threaded",
    "ignore:Got pickle error when attempting to start a worker",  # PyTorch's own words, before the error is raised
)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_torch_are_refused_with_what_to_do(lmdb_shards: Path, context: str) -> None:
    with crops_on(lmdb_shards) as loader:
        batches = DataLoader(
            to_torch(loader), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=60
        )
        with pytest.raises(UsageError, match="num_workers=0"):
            next(iter(batches))


def test_encoded_images_come_as_a_list_of_bytes_in_tensors(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, transform=None) as loader, crops_on(lmdb_shards, transform=None) as other:
        for (images, labels, _), (expected, *_) in zip(
            DataLoader(to_torch(loader), batch_size=None), other, strict=True
        ):
            assert [bytes(image.numpy()) for image in images] == [bytes(image) for image in expected]
            assert len(images) == len(labels)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", ["torch", "torchdata"])
def test_batches_stop_and_go_on(lmdb_shards: Path, name: str) -> None:
    def batches_of(loader: Loader) -> Any:
        if name == "torch":
            return to_torch(loader)
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        return stateful(to_torch(loader), batch_size=None)

    with crops_on(lmdb_shards) as loader:
        whole = epoch_of(loader)
    with crops_on(lmdb_shards) as loader:
        batches = batches_of(loader)
        some = arrays_of(batches, 8)
        state = batches.state_dict()
    with crops_on(lmdb_shards) as loader:
        batches = batches_of(loader)
        batches.load_state_dict(state)
        assert_same(some + arrays_of(batches), whole)


def test_a_source_without_a_state_makes_a_dataset_without_one() -> None:
    assert not hasattr(to_torch([1]), "state_dict")


def read_only() -> np.ndarray[Any, Any]:
    array = np.arange(6)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        read_only(),
        np.arange(6, dtype=">i4"),
        np.arange(6)[::-1],
        np.zeros(3, [("a", "u1"), ("b", "<i4")])["b"],
        np.frombuffer(bytearray(9), np.int32, 2, 1),
        np.broadcast_to(np.float32(1), (3, 2)),
    ],
    ids=["read-only", "foreign", "backwards", "packed", "unaligned", "broadcast"],
)
def test_what_torch_cannot_share_is_copied(array: np.ndarray[Any, Any]) -> None:
    (tensor,) = to_torch([array])

    assert tensor.numpy().tolist() == array.tolist()
    assert tensor.data_ptr() != array.ctypes.data


@pytest.mark.parametrize(
    "array", [np.arange(12).reshape(3, 4).T, np.arange(6)[::2], np.array(3.0), np.zeros((0, 2))]
)
def test_what_torch_can_share_is_shared(array: np.ndarray[Any, Any]) -> None:
    (tensor,) = to_torch([array])

    assert tensor.numpy().tolist() == array.tolist()
    assert tensor.data_ptr() in (array.ctypes.data, 0)


def test_leaving_early_ends_the_sources_pass() -> None:
    ended = []

    def batches() -> Iterator[Any]:
        try:
            yield from ([n] for n in range(3))
        finally:
            ended.append(True)

    source = batches()
    for _ in to_torch(source):
        break

    assert ended


def test_a_generator_has_one_epoch() -> None:
    batches = to_torch(np.zeros(1) for _ in range(2))

    assert len(list(batches)) == 2
    with pytest.raises(UsageError, match="one pass"):
        iter(batches)
