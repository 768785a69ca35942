"""The loader's batches as PyTorch tensors over the loader's memory, each record once."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow, Loader, TrainTransform
from support.flow_functions import named, pair, pair_but_17
from support.loaded import Kept, assert_exactly_once, assert_same, crops_on, epoch_of
from support.loader_workers import OwnError, Tagging, fail

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from shardprep.loaders.torch_data import to_torch  # noqa: E402


def arrays_of(batches: Any, steps: int | None = None) -> list[Kept]:
    """Copy arrays, as a caller that keeps them would."""
    return epoch_of((tuple(part.numpy() for part in batch) for batch in batches), steps)


def span(tensor: Any) -> set[int]:
    """The addresses of a tensor's bytes, by 64."""
    start = tensor.data_ptr()
    return set(range(start // 64, (start + tensor.nbytes) // 64))


@pytest.fixture
def whole(lmdb_shards: Path) -> list[Kept]:
    """Epochs 0 and 1 in numpy."""
    with crops_on(lmdb_shards) as loader:
        return epoch_of(loader) + epoch_of(loader)


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=None)], ids=["bare", "DataLoader"]
)
def test_two_epochs_are_those_of_the_loader_bit_for_bit(
    lmdb_shards: Path, whole: list[Kept], wrap: Any
) -> None:
    with crops_on(lmdb_shards) as loader:
        batches, epochs = wrap(to_torch(loader)), []
        for _ in range(2):
            assert len(batches) == len(loader) == 21
            epochs.append(arrays_of(batches))
            assert_exactly_once(loader, epochs[-1])
            assert len(epochs[-1][-1][0]) == 4

    assert_same(epochs[0] + epochs[1], whole)


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


def test_leaving_early_is_followed_by_a_whole_epoch(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards) as loader:
        for _ in DataLoader(to_torch(loader), batch_size=None):
            break
        epoch = arrays_of(to_torch(loader))
        assert_exactly_once(loader, epoch)

    assert_same(epoch, whole[21:])


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


def test_a_slot_stays_lent_while_a_tensor_on_it_lives(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, slots=5) as loader:
        batches = to_torch(loader)
        for images, *_ in batches:
            held, expected = images[3:5], images[3:5].clone()
            break
        del images, _
        for _ in range(3):
            for images, *_ in batches:
                assert not span(held) & span(images)
                assert torch.equal(held, expected)
        where = span(held)
        del held
        assert any(where & span(images) for _ in range(3) for images, *_ in batches)


def test_an_error_of_the_loader_comes_as_itself(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards) as loader:
        key = loader.key(100)
    with (
        crops_on(lmdb_shards, transform=Tagging({key: fail})) as loader,
        pytest.raises(OwnError, match="this one not"),
    ):
        arrays_of(DataLoader(to_torch(loader), batch_size=None))


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


def test_a_resumed_loader_has_the_length_that_is_left(lmdb_shards: Path, whole: list[Kept]) -> None:
    with crops_on(lmdb_shards) as loader:
        batches = to_torch(loader)
        some = arrays_of(batches, 8)
        state = batches.state_dict()  # type: ignore[attr-defined]
    with crops_on(lmdb_shards) as loader:
        batches = to_torch(loader)
        batches.load_state_dict(state)  # type: ignore[attr-defined]
        delivered = DataLoader(batches, batch_size=None)
        assert len(delivered) == 13
        some += arrays_of(delivered)
        assert len(delivered) == 21
        assert_same(some + arrays_of(delivered), whole)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_stops_and_goes_on(lmdb_shards: Path, whole: list[Kept]) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with crops_on(lmdb_shards) as loader:
        batches = stateful(to_torch(loader), batch_size=None)
        some = arrays_of(batches, 8)
        state = batches.state_dict()
    with crops_on(lmdb_shards) as loader:
        batches = stateful(to_torch(loader), batch_size=None)
        batches.load_state_dict(state)
        some += arrays_of(batches)

    assert_same(some, whole[:21])


def test_a_source_without_a_state_makes_a_dataset_without_one() -> None:
    assert not hasattr(to_torch([1]), "state_dict")


NUMBERS = Flow.from_iterable(range(23)).shuffle(9, seed=1)


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=None)], ids=["bare", "DataLoader"]
)
def test_two_epochs_of_a_flow_are_its_first_two_passes_bit_for_bit(wrap: Any) -> None:
    with NUMBERS.map(pair, random=True, processes=1).batch(5) as flow:
        batches = wrap(to_torch(flow))
        for number in range(2):
            expected = NUMBERS.map(pair, random=True).batch(5).at_pass(number)
            assert len(batches) == 5
            assert_same(arrays_of(batches), list(expected))


def test_a_padded_flow_of_dicts_keeps_its_names_and_mask() -> None:
    got = list(to_torch(NUMBERS.map(named, random=True).batch(5, remainder="pad")))

    assert [list(batch) for batch in got] == [["values", "number", "mask"]] * 5
    assert torch.cat([batch["mask"] for batch in got]).tolist() == [True] * 23 + [False] * 2


def test_batches_of_a_flow_are_not_copied() -> None:
    made: list[int] = []
    flow = (
        NUMBERS.map(pair, random=True).batch(5).filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    )

    assert [values.data_ptr() for values, _ in DataLoader(to_torch(flow), batch_size=None)] == made
    with pytest.raises(TypeError):
        len(to_torch(flow))


def test_an_error_of_a_flows_map_comes_as_itself_after_the_batches_before_it() -> None:
    batches = to_torch(Flow.from_iterable(range(23)).map(pair_but_17, threads=2).batch(5))
    for _ in range(2):
        got: list[int] = []
        with pytest.raises(OwnError, match="this one not"):
            got.extend(int(number) for _, numbers in batches for number in numbers)
        assert got == list(range(15))


Point = namedtuple("Point", ["x", "y"])


def test_the_form_of_a_batch_is_kept() -> None:
    x, text, thing = np.zeros((2, 3), np.float32), np.array(["a"]), object()
    batch = {
        "point": Point(x, (x,)),
        "list": [b"bytes", "text", x],
        "text": text,
        "thing": thing,
        "empty": [],
    }

    (got,) = to_torch([batch])

    assert list(got) == list(batch)
    assert isinstance(got["point"], Point)
    assert got["point"].y[0].data_ptr() == x.ctypes.data
    assert got["list"][:2] == [b"bytes", "text"]
    assert torch.is_tensor(got["list"][2])
    assert got["text"] is text
    assert got["thing"] is thing
    assert got["empty"] == []


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


def test_a_function_gives_an_epoch_each_time_and_no_length() -> None:
    batches = to_torch(lambda: (np.full(2, n) for n in range(3)))

    for _ in range(2):
        assert [int(batch[0]) for batch in batches] == [0, 1, 2]
    with pytest.raises(TypeError):
        len(batches)


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


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_without_the_framework_the_error_names_the_extra(name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; import shardprep.loaders; import shardprep.loaders.{name}_data"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert f"pip install 'shardprep[{name}]'" in done.stderr.splitlines()[-1]


def test_the_loaders_do_not_import_a_framework() -> None:
    program = "import sys, shardprep.loaders; sys.exit(bool({'torch', 'jax'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_a_subset_comes_as_tensors_each_record_once(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, records=range(50, 90)) as loader:
        batches = arrays_of(to_torch(loader))
        loader.receipt().check(40)

    assert sorted(int(number) for batch in batches for number in batch[-1]) == list(range(50, 90))
