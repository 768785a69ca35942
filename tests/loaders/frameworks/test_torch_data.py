"""PyTorch: batches as tensors over the loader's memory, and datasets in its own DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep import Record, TransformedDataset, collect, open_collection, open_dataset
from shardprep.formats.errors import CorruptRecord, UsageError
from shardprep.loaders import EvalTransform, FakeData, Flow, Loader, TrainTransform
from shardprep.loaders.batches.pickling import PickledValue
from support.loaded import Kept, assert_same, crops_on, epoch_of

torch = pytest.importorskip("torch")

from torch.utils.data import ConcatDataset, DataLoader, random_split  # noqa: E402

from shardprep.loaders.torch_data import to_torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:os.fork",
    "ignore:This process .* is multi-threaded",
    "ignore:Got pickle error when attempting to start a worker",  # PyTorch's own words, before the error is raised
)


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

    assert [batch.shape for batch in DataLoader(to_torch(items), batch_size=4)] == [(4, 3), (2, 3)]


def test_plain_tensors_pass_between_processes_beside_their_pickle() -> None:
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.uint16), torch.ones(3, requires_grad=True)]
    assert [len(PickledValue.of(tensor).buffers) for tensor in tensors] == [1, 1, 0]
    with Flow.from_iterable(tensors).map(torch.detach, processes=1) as passed:
        assert [(each.dtype, each.tolist()) for each in passed] == [(each.dtype, [1] * 3) for each in tensors]


def test_bits_of_bfloat16_are_viewed_as_torch_s(lmdb_shards: Path) -> None:
    exact, rounded = (
        next(iter(to_torch(crops_on(lmdb_shards, workers=0, transform=TrainTransform(8, dtype=dtype)))))[0]
        for dtype in ("float32", "bfloat16")
    )

    assert rounded.view(torch.bfloat16).equal(exact.to(torch.bfloat16))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_torch_are_refused_with_what_to_do(lmdb_shards: Path, context: str) -> None:
    with crops_on(lmdb_shards) as loader:
        options = FORKED | {"multiprocessing_context": context}
        batches = DataLoader(to_torch(loader), batch_size=None, **options)
        with pytest.raises(UsageError, match="num_workers=0"):
            next(iter(batches))


def test_encoded_images_come_as_a_list_of_bytes_in_tensors(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, transform=None) as loader, crops_on(lmdb_shards, transform=None) as other:
        batches = DataLoader(to_torch(loader), batch_size=None)
        for (images, labels, _), (expected, *_) in zip(batches, other, strict=True):
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

    def in_numpy(batches: Any) -> list[Kept]:
        return [tuple(part.numpy().copy() for part in batch) for batch in batches]

    with crops_on(lmdb_shards) as loader:
        whole = epoch_of(loader)
    with crops_on(lmdb_shards) as loader:
        batches = batches_of(loader)
        some, state = in_numpy(islice(batches, 8)), batches.state_dict()
    with crops_on(lmdb_shards) as loader:
        batches = batches_of(loader)
        batches.load_state_dict(state)
        assert_same(some + in_numpy(batches), whole)


def test_a_source_without_a_state_makes_a_dataset_without_one() -> None:
    assert not hasattr(to_torch([1]), "state_dict")


SHARED = {
    "read-only": (np.frombuffer(np.arange(6).tobytes(), np.int64), False),
    "foreign": (np.arange(6, dtype=">i4"), False),
    "backwards": (np.arange(6)[::-1], False),
    "packed": (np.zeros(3, [("a", "u1"), ("b", "<i4")])["b"], False),
    "unaligned": (np.frombuffer(bytearray(9), np.int32, 2, 1), False),
    "broadcast": (np.broadcast_to(np.float32(1), (3, 2)), False),
    "transposed": (np.arange(12).reshape(3, 4).T, True),
    "every other": (np.arange(6)[::2], True),
    "scalar": (np.array(3.0), True),
    "empty": (np.zeros((0, 2)), True),
}


@pytest.mark.parametrize(("array", "is_shared"), SHARED.values(), ids=SHARED)
def test_what_torch_can_share_is_shared_and_the_rest_copied(array: Any, is_shared: bool) -> None:
    (tensor,) = to_torch([array])
    assert tensor.numpy().tolist() == array.tolist()
    assert (tensor.data_ptr() in (array.ctypes.data, 0)) == is_shared


def test_leaving_early_ends_the_sources_pass() -> None:
    ended = []

    def batches() -> Iterator[Any]:
        try:
            yield from ([n] for n in range(3))
        finally:
            ended.append(True)

    next(iter(to_torch(batches())))
    assert ended


HERE: dict[str, Any] = {}
FORKED = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
SPAWNED = FORKED | {"multiprocessing_context": "spawn"}
WHAT_TO_WRITE = r"DataLoader\(to_torch\(loader\), batch_size=None\)"


def length_and_key(record: Record) -> tuple[int, str]:
    return len(record.image), record.key


def coin(record: Record, rng: np.random.Generator) -> float:
    return rng.random()


def damaged(record: Record) -> int:
    raise CorruptRecord("does not match its checksum", path="shard", key=record.key)


@pytest.mark.parametrize("workers", [HERE, FORKED], ids=["here", "forked"])
def test_records_collate_into_images_and_labels(lmdb_shards: Path, workers: dict[str, Any]) -> None:
    with open_dataset(lmdb_shards) as dataset:
        expected = list(dataset)
        got = list(DataLoader(dataset, batch_size=50, **workers))

    assert [len(labels) for _, labels in got] == [50, 50, 50, 50, 4]
    assert [image for images, _ in got for image in images] == [record.image for record in expected]
    assert torch.cat([labels for _, labels in got]).tolist() == [record.label for record in expected]


@pytest.mark.parametrize(
    "wrap",
    [lambda ds: ConcatDataset([ds, ds]), lambda ds: random_split(ds, [0.5, 0.5])[0]],
    ids=["concat", "split"],
)
def test_records_collate_in_datasets_that_wrap_theirs(lmdb_shards: Path, wrap: Callable[[Any], Any]) -> None:
    with open_dataset(lmdb_shards) as dataset:
        images, labels = next(iter(DataLoader(wrap(dataset), batch_size=4)))

    assert all(isinstance(image, bytes) for image in images)
    assert labels.dtype == torch.int64


def test_a_collate_function_of_the_user_is_given_records(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        (records,) = DataLoader(dataset, batch_size=999, collate_fn=list)

        assert [each.key for each in records] == [record.key for record in dataset]


@pytest.mark.parametrize("workers", [HERE, FORKED, pytest.param(SPAWNED, marks=pytest.mark.slow)], ids=str)
def test_a_loaders_transform_makes_a_loaders_batches(lmdb_shards: Path, workers: dict[str, Any]) -> None:
    crop = EvalTransform(24)
    options = {"transform": crop, "shuffle": None, "with_numbers": False, "workers": 0, "batch_size": 50}
    with crops_on(lmdb_shards, **options) as loader, open_dataset(lmdb_shards, transform=crop) as dataset:
        assert len(dataset) == 204
        assert dataset.classes == loader.dataset.classes
        for (images, labels), (expected, classes) in zip(
            DataLoader(dataset, batch_size=50, **workers), loader, strict=True
        ):
            np.testing.assert_array_equal(images.numpy(), expected)
            assert labels.tolist() == classes.tolist()


def test_a_transform_may_be_a_function_of_the_record_alone(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards, transform=coin) as dataset, open_dataset(lmdb_shards) as records:
        dataset.transform = length_and_key
        assert list(dataset)[7] == dataset[7] == ((len(records[7].image), records[7].key), records[7].label)


def test_random_transforms_are_seeded_as_dataloader_seeds_its_workers(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards, transform=coin) as dataset:

        def epoch(seed: int) -> list[float]:
            torch.manual_seed(seed)
            return torch.cat([coins for coins, _ in DataLoader(dataset, batch_size=50, **FORKED)]).tolist()

        first = epoch(1)
        assert epoch(1) == first != epoch(2)
        assert len(set(first)) == 204
        random.seed(3)
        one = dataset[0]
        random.seed(3)
        assert dataset[0] == one != dataset[0]


def test_an_error_of_a_worker_has_its_type_its_lines_and_its_record(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards, transform=damaged) as dataset:
        batches = iter(DataLoader(dataset, batch_size=len(dataset), **FORKED))
        with pytest.raises(CorruptRecord) as raised:
            next(batches)
        assert not list(batches)  # which ends the workers, for whom PyTorch would wait 10 s

    lines = str(raised.value).splitlines()
    assert lines[0].startswith("Caught CorruptRecord in DataLoader worker process")
    assert [line for line in lines if line.endswith(": does not match its checksum")]
    assert lines[-1].startswith("In record n")


@pytest.mark.parametrize("wrong", [EvalTransform, 5, "resize"])
def test_what_is_no_transform_is_refused_at_once(lmdb_shards: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="a callable of a record"):
        open_dataset(lmdb_shards, transform=wrong)


@pytest.mark.parametrize("options", [HERE, {"batch_size": None}, {"shuffle": True}, FORKED], ids=str)
def test_a_data_loader_over_what_makes_batches_says_what_to_write(
    lmdb_shards: Path, options: dict[str, Any]
) -> None:
    with crops_on(lmdb_shards, workers=0) as loader:
        for source in (loader, FakeData(3, batch_size=2), Flow.fake(9).batch(3), Flow.from_callable(list)):
            with pytest.raises(UsageError, match=WHAT_TO_WRITE):
                next(iter(DataLoader(source, **options)))
        with pytest.raises(UsageError, match=WHAT_TO_WRITE):
            next(iter(DataLoader(loader, **SPAWNED)))  # its pickle is made before a sampler


def test_a_collection_is_transformed_as_well(lmdb_shards: Path, tmp_path: Path) -> None:
    collect(tmp_path / "both", [lmdb_shards])
    with TransformedDataset(open_collection(tmp_path / "both"), length_and_key) as dataset:
        assert len(next(iter(DataLoader(dataset, batch_size=4)))) == 2
