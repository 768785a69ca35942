"""The loader's batches as tensors of PyTorch and arrays of JAX: the same, over the loader's memory."""

import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.loaders import Flow
from support.flow_functions import pair
from support.loaded import Kept, assert_exactly_once, assert_same, crops_on, epoch_of
from support.loader_workers import OwnError, Tagging, fail


class Framework(NamedTuple):
    """How a source becomes batches of a framework, and what is asked of their arrays."""

    batches_of: Callable[[Any], Any]
    array: type
    address: Callable[[Any], int]
    is_short: bool = False  # integers have 32 bits

    def stored(self, batches: list[Kept]) -> list[Kept]:
        """The batches in numpy as the framework has them: JAX without jax_enable_x64 has no int64."""
        if not self.is_short:
            return batches
        return [(images, *(part.astype(np.int32) for part in rest)) for images, *rest in batches]

    def span(self, array: Any) -> set[int]:
        """The addresses of an array's bytes, by 64."""
        start = self.address(array)
        return set(range(start // 64, (start + array.nbytes) // 64))


@pytest.fixture(params=["torch", "torch's DataLoader", "jax"])
def framework(request: pytest.FixtureRequest) -> Framework:
    if request.param == "jax":
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "cpu":
            pytest.skip("other devices have memory of their own")
        from shardprep.loaders.jax_data import to_jax

        return Framework(to_jax, jax.Array, lambda array: array.unsafe_buffer_pointer(), is_short=True)
    torch = pytest.importorskip("torch")
    from shardprep.loaders.torch_data import to_torch

    def in_data_loader(source: Any) -> Any:
        return torch.utils.data.DataLoader(to_torch(source), batch_size=None)

    make = to_torch if request.param == "torch" else in_data_loader
    return Framework(make, torch.Tensor, lambda tensor: tensor.data_ptr())


def arrays_of(batches: Any, steps: int | None = None) -> list[Kept]:
    """Copy arrays to numpy, as a caller that keeps them would."""
    return epoch_of((tuple(np.asarray(part).copy() for part in batch) for batch in batches), steps)


@pytest.fixture
def whole(lmdb_shards: Path, framework: Framework) -> list[Kept]:
    """Epochs 0 and 1."""
    with crops_on(lmdb_shards) as loader:
        return framework.stored(epoch_of(loader) + epoch_of(loader))


def test_epochs_are_those_of_the_loader_bit_for_bit_also_after_one_that_was_left(
    lmdb_shards: Path, framework: Framework, whole: list[Kept]
) -> None:
    with crops_on(lmdb_shards) as loader:
        batches = framework.batches_of(loader)
        assert len(batches) == len(loader) == 21
        first = arrays_of(batches)
        assert_exactly_once(loader, first)
        assert len(first[-1][0]) == 4
        loader.set_epoch(0)
        for _ in batches:
            break
        second = arrays_of(batches)
        assert_exactly_once(loader, second)

    assert_same(first + second, whole)


def test_a_slot_stays_lent_while_an_array_on_it_lives(lmdb_shards: Path, framework: Framework) -> None:
    with crops_on(lmdb_shards, slots=6) as loader:
        batches = framework.batches_of(loader)
        for images, *_ in batches:
            held, expected = images, np.asarray(images).copy()
            break
        del images, _
        for _ in range(3):
            for images, *_ in batches:
                assert not framework.span(held) & framework.span(images)
                assert (np.asarray(held) == expected).all()


def test_a_slot_comes_back_when_its_array_is_dropped(lmdb_shards: Path, framework: Framework) -> None:
    with crops_on(lmdb_shards, slots=5) as loader:
        batches = framework.batches_of(loader)
        places = {framework.address(images) for _ in range(4) for images, *_ in batches}

    assert len(places) <= 5


def test_an_error_of_the_loader_comes_as_itself(lmdb_shards: Path, framework: Framework) -> None:
    with crops_on(lmdb_shards) as loader:
        key = loader.key(100)
    with (
        crops_on(lmdb_shards, transform=Tagging({key: fail})) as loader,
        pytest.raises(OwnError, match="this one not"),
    ):
        for _ in framework.batches_of(loader):
            pass


def test_a_resumed_loader_has_the_length_that_is_left(
    lmdb_shards: Path, framework: Framework, whole: list[Kept]
) -> None:
    with crops_on(lmdb_shards) as loader:
        some = arrays_of(framework.batches_of(loader), 8)
        state = loader.state_dict()
    with crops_on(lmdb_shards) as loader:
        loader.load_state_dict(state)
        batches = framework.batches_of(loader)
        assert len(batches) == 13
        some += arrays_of(batches)
        assert len(batches) == 21
        assert_same(some + arrays_of(batches), whole)


NUMBERS = Flow.from_iterable(range(23)).shuffle(9, seed=1)


def test_two_epochs_of_a_flow_are_its_first_two_passes_bit_for_bit(framework: Framework) -> None:
    with NUMBERS.map(pair, random=True, processes=1).batch(5) as flow:
        batches = framework.batches_of(flow)
        for number in range(2):
            expected = NUMBERS.map(pair, random=True).batch(5).at_pass(number)
            assert len(batches) == 5
            assert_same(arrays_of(batches), framework.stored(list(expected)))


def test_batches_of_a_flow_are_not_copied(framework: Framework) -> None:
    made: list[int] = []
    flow = (
        NUMBERS.map(pair, random=True).batch(5).filter(lambda batch: made.append(batch[0].ctypes.data) or 1)
    )
    batches = framework.batches_of(flow)

    assert [framework.address(values) for values, _ in batches] == made
    with pytest.raises(TypeError):
        len(batches)


Point = namedtuple("Point", ["x", "y"])


def test_the_form_of_a_batch_is_kept(framework: Framework) -> None:
    x, text, thing = np.zeros((2, 3), np.float32), np.array(["a"]), object()
    batch = {
        "point": Point(x, (x,)),
        "list": [b"bytes", "text", x],
        "text": text,
        "thing": thing,
        "empty": [],
    }

    (got,) = framework.batches_of([batch])

    assert list(got) == list(batch)
    assert isinstance(got["point"], Point)
    assert isinstance(got["point"].y[0], framework.array)
    assert got["list"][:2] == [b"bytes", "text"]
    assert isinstance(got["list"][2], framework.array)
    assert got["text"] is text
    assert got["thing"] is thing
    assert got["empty"] == []


def test_a_function_gives_an_epoch_each_time_and_no_length(framework: Framework) -> None:
    batches = framework.batches_of(lambda: (np.full(2, n) for n in range(3)))

    for _ in range(2):
        assert [int(batch[0]) for batch in batches] == [0, 1, 2]
    with pytest.raises(TypeError):
        len(batches)


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        *(
            (f"modules[{name!r}] = None", f"{name}_data", f"pip install 'shardprep[{name}]'")
            for name in ("torch", "jax")
        ),
        ("modules['ray'] = None; import shardprep; shardprep.RayExecutor()", "flow", "shardprep[ray]"),
        ("platform = 'darwin'", "tf_inputs", "shardprep needs Linux: WSL 2 on Windows"),
    ],
)
def test_without_the_framework_or_linux_the_error_says_so(change: str, name: str, said: str) -> None:
    program = f"import sys; sys.{change}; import shardprep.loaders; import shardprep.loaders.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert said in done.stderr.splitlines()[-1]


def test_the_loaders_import_neither_a_framework_nor_zeromq() -> None:
    """Each worker imports them at its start."""
    names = {"torch", "jax", "zmq", "shardprep.loaders.machines.codec"}
    program = f"import sys, shardprep.loaders; sys.exit(bool({names} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
