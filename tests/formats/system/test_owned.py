"""An owner of a descriptor, map, socket, thread or process cannot be copied, and releases only its own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import OutputBusy
from shardprep.formats.runtime.owned import Descriptor
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.runtime.workers import Child, WorkerPool
from shardprep.formats.shards.read import OpenShards, container
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import Flow, Loader, LocalShuffle
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import Bell, CpuClock
from shardprep.loaders.machines.frames import FrameReceiver
from shardprep.loaders.remote import RemoteSource
from support.engine_workers import Writing, layout
from support.loader_workers import Tagging
from support.owners import (
    assert_refuses_copies,
    files_opened_afterwards,
    temporary_folder,
)

ANY_PORT = "tcp://127.0.0.1:*"


GoOn = Callable[[], object]


@contextmanager
def loader(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    options: dict[str, Any] = {
        "batch_size": 4,
        "transform": Tagging(),
        "shuffle": LocalShuffle(9),
        "read_ahead": 0,
    }
    with Loader(path, workers=2, slots=3, **options) as made, closing(iter(made)) as batches:  # type: ignore[type-var]
        next(batches)
        yield made, lambda: sum(1 for _ in batches) == len(made) - 1 and made.stats().restarts == 0


@contextmanager
def engine(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with Engine(Writing(), layout(4), workers=1) as made, closing(made.run([np.arange(4)] * 20)) as batches:  # type: ignore[type-var]
        next(batches)
        yield made, lambda: sum(1 for _ in batches) == 19


@contextmanager
def open_shards(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    manifest = open_dataset(path).manifest
    with closing(OpenShards(path, manifest.container, manifest.shards)) as made:
        with container(manifest.container).read(made[0].path) as reader:
            address = reader.address(0)
        before = made.image(0, 0, address)
        yield made, lambda: made.image(0, 0, address) == before


@contextmanager
def remote(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with RemoteSource(ANY_PORT) as made:
        yield made, lambda: made.stats().batches == 0


@contextmanager
def receiver(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with FrameReceiver(ANY_PORT) as made:
        yield made, lambda: made.rejected == 0


REAL: dict[str, Callable[..., Any]] = {
    "loader": loader,
    "engine": engine,
    "open shards": open_shards,
    "remote source": remote,
    "receiver": receiver,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", REAL.values(), ids=REAL.keys())
def test_an_owner_refuses_to_be_copied_at_once_and_goes_on(
    make: Callable[..., Any], lmdb_shards: Path, tmp_path: Path
) -> None:
    with temporary_folder(tmp_path) as temporary, ExitStack() as opened:
        (tmp_path / "made").mkdir()
        (tmp_path / "files").mkdir()
        owner, go_on = opened.enter_context(make(lmdb_shards, tmp_path / "made"))
        assert_refuses_copies(owner, temporary)
        with files_opened_afterwards(tmp_path / "files"):
            assert go_on()
            opened.close()
            del owner, go_on
            gc.collect()


def test_a_pass_under_way_is_no_copy_either(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=4, workers=1) as made, closing(iter(made)) as batches:  # type: ignore[type-var]
        next(batches)
        with pytest.raises(TypeError):
            copy.deepcopy(batches)

        assert sum(1 for _ in batches) == len(made) - 1


# What may be copied


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
def test_a_dataset_a_flow_and_a_closed_reader_are_copied_by_what_they_are_made_of(
    again: Callable[[Any], Any], lmdb_shards: Path
) -> None:
    listing = recognise(lmdb_shards.parent / "archives").listing("val")
    with open_dataset(lmdb_shards) as dataset, Flow.from_iterable(range(5)).map(abs, threads=2) as flow:
        first = dataset[0]
        with again(dataset) as other:
            assert other[0] == first
        with again(flow) as other_flow:
            assert list(other_flow) == list(flow)
        with listing.reader as reader:
            image = reader.read(listing.entries[0])
        with again(listing.reader) as other_reader:
            assert other_reader.read(listing.entries[0]) == image

        assert dataset[1].key != first.key


# In a forked copy of the process


def in_a_forked_copy(check: Callable[[], bool]) -> bool:
    """Return the output of ``check`` in the forked copy."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = not check()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_copy_that_has_closed_all_files_writes_to_and_closes_none_of_those_it_opens_then(
    hdf5_shards: Path, tmp_path: Path
) -> None:
    dataset = open_dataset(hdf5_shards)
    bell, clock, held = Bell(), CpuClock(), [dataset.shard(0), Descriptor(os.open(os.devnull, os.O_RDONLY))]
    numbers = [bell.fileno(), bell._write_end.fileno(), clock._file.fileno()]

    def check() -> bool:
        nonlocal bell, clock, held
        os.closerange(3, 1000)
        with files_opened_afterwards(tmp_path):
            bell.ring()
            held[0].close()
            held[1].close()
            del bell, clock, held
            gc.collect()
        return True

    assert in_a_forked_copy(check)
    assert all(os.fstat(number) for number in numbers)


@pytest.mark.slow
def test_a_forked_copy_that_closes_an_owner_leaves_the_original_alone(tmp_path: Path) -> None:
    with Child() as made, WorkerPool(1) as workers, WorkFolder(tmp_path / "output") as place:
        workers.submit(abs, 1).result()

        def check() -> bool:
            made.kill()
            made.__exit__()
            place.__exit__(None, None, None)
            return True

        assert in_a_forked_copy(check)
        assert made.call(divmod, 7, 2) == (3, 1)
        assert workers.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(OutputBusy):
            WorkFolder(tmp_path / "output").__enter__()
        place.remove()
