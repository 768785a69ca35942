"""An owner of a descriptor, map, socket, thread or process cannot be copied, and releases only its own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import OutputBusy
from shardprep.formats.runtime.files import ArchiveFile
from shardprep.formats.runtime.owned import Descriptor
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.runtime.workers import Child, WorkerPool
from shardprep.formats.shards.read import OpenShards, container
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import Flow, Loader, LocalShuffle
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import Bell, CpuClock
from shardprep.loaders.flow.thread_map import Threads
from shardprep.loaders.loader.read_ahead import ReadAhead, ShardStream
from shardprep.loaders.machines.frames import FrameReceiver
from shardprep.loaders.machines.socket import ExclusiveUse
from shardprep.loaders.remote import RemoteSource
from support.datasets import converted
from support.engine_workers import Writing, layout
from support.loader_workers import Tagging
from support.owners import (
    assert_refuses_copies,
    can_be_let_go,
    classes,
    files_opened_afterwards,
    is_owned,
    keeps_something,
    owns,
    temporary_folder,
)
from support.sampling import torture_except

ANY_PORT = "tcp://127.0.0.1:*"

COPYABLE = "is picklable by design, and the copy opens for itself what it needs"
ITERATOR = "has its source's iterator, which answers for itself"
MEMORY = "has nothing of the system, only what was computed"
NOT_OWNED = {
    "RecordSet": COPYABLE,
    "Dataset": COPYABLE,
    "Collection": COPYABLE,
    "CachedDataset": COPYABLE,
    "TransformedDataset": COPYABLE,
    "Flow": COPYABLE,
    "Pipeline": COPYABLE,
    "FlowSources": COPYABLE,
    "ByteReader": COPYABLE,
    "TarReader": COPYABLE,
    "RemoteTarReader": COPYABLE,
    "TextReader": COPYABLE,
    "TreeReader": COPYABLE,
    "RecordReader": COPYABLE,
    "HeldItems": COPYABLE,
    "FetchedItems": COPYABLE,
    "ImagesAndFile": COPYABLE,
    "CocoReader": COPYABLE,
    "MetadataReader": COPYABLE,
    "PairedReader": COPYABLE,
    "FilesReader": COPYABLE,
    "RowReader": COPYABLE,
    "ExampleReader": COPYABLE,
    "SampleReader": COPYABLE,
    "ItemReader": COPYABLE,
    "JoinedValues": COPYABLE,
    "ArrayValues": COPYABLE,
    "DatasetValues": COPYABLE,
    "TableValues": COPYABLE,
    "_Bounded": MEMORY,
    "ErrorNote": MEMORY,
    "SenderAuth": MEMORY,
    "KnownForm": MEMORY,
    "_LastIterator": MEMORY,
    "_Skeleton": MEMORY,
    "_Store": MEMORY,
    "FakeData": MEMORY,
    "FakeDataset": MEMORY,
    "EpochLoader": "is the base of FakeData, which has memory only, and of Loader, which is owned",
    "ReplayableLoader": "is the base of Loader, which is owned",
    "LocalShards": "has nothing; ShardFeed, which is made of it, is owned",
    "Passes": "has its source, which answers for itself",
    "_Pass": ITERATOR,
    "OpenPart": ITERATOR,
    "RunningPass": ITERATOR,
    "_TimedDraws": ITERATOR,
}


@pytest.mark.slow
def test_every_class_that_owns_something_refuses_to_be_copied() -> None:
    owners = [cls for cls in classes() if owns(cls) and cls.__name__ not in NOT_OWNED]

    assert len(owners) > 50
    assert [cls.__qualname__ for cls in owners if not is_owned(cls)] == []


def test_what_is_said_not_to_own_anything_is_there_and_does_not_refuse() -> None:
    found = {cls.__name__: cls for cls in classes() if cls.__name__ in NOT_OWNED}

    assert set(found) == set(NOT_OWNED)
    assert [name for name, cls in found.items() if is_owned(cls) or not can_be_let_go(cls)] == []


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self): self._number = os.open('x', 0)",
        "class A:\n    def __init__(self): self._ours, self._theirs = socket.socketpair()",
        "class A:\n    def start(self): self._thread: Any = threading.Thread(target=print)",
        "class A:\n    def __init__(self, end: socket.socket): self._end = end",
        "class A:\n    process: SpawnedProcess",
        "class A:\n    def __init__(self): self.close = weakref.finalize(self, print)",
    ],
)
def test_a_new_class_that_keeps_something_would_be_found(source: str) -> None:
    assert keeps_something(source)
    assert not keeps_something(
        "class A:\n    size: int\n    def __init__(self): self._size = len(os.fspath('x'))"
    )


def test_a_new_class_that_can_be_closed_would_be_found() -> None:
    class Closed:
        def close(self) -> None: ...

    class Derived(Closed): ...

    Closed.__module__ = Derived.__module__ = "owners"

    assert can_be_let_go(Derived)


# Real ones


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
def part_of_engine(part: Callable[[Any], Any], path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with engine(path, folder) as (made, go_on):
        yield part(made._dispatcher), go_on  # type: ignore[attr-defined]


@contextmanager
def kept_of_a_flow(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with (
        Flow.from_iterable(range(200)).map(abs, processes=1) as flow,
        closing(iter(flow)) as items,  # type: ignore[type-var]
    ):
        next(items)
        yield flow._kept, lambda: sum(1 for _ in items) == 199


@contextmanager
def threads(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with closing(Threads(2, "test")) as made:
        yield made, lambda: True


@contextmanager
def read_ahead(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    shards = open_dataset(path).blocks
    with closing(ReadAhead(ShardStream.of(path, shards, np.arange(len(shards))), budget=1 << 20)) as made:
        yield made, lambda: made.expect(np.arange(20)) is None


@contextmanager
def pool(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with WorkerPool(1) as made:
        assert made.submit(divmod, 7, 2).result() == (3, 1)
        yield made, lambda: made.submit(divmod, 9, 2).result() == (4, 1)


@contextmanager
def child(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with Child() as made:
        made.call(abs, 1)
        yield made, lambda: made.call(divmod, 9, 2) == (4, 1)


@contextmanager
def shard(kind: str, path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    manifest = converted(path.parent / "archives", folder / kind, split="val", container=kind)
    with container(kind).read(folder / kind / manifest.shards[0].name) as made:
        before = made.checked(0)
        yield made, lambda: made.checked(0) == before


@contextmanager
def open_shards(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    manifest = open_dataset(path).manifest
    with closing(OpenShards(path, manifest.container, manifest.shards)) as made:
        with container(manifest.container).read(made[0].path) as reader:
            address = reader.address(0)
        before = made.image(0, 0, address)
        yield made, lambda: made.image(0, 0, address) == before


@contextmanager
def opened_reader(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    listing = recognise(path.parent / "archives").listing("val")
    with copy.copy(listing.reader) as made:
        before = made.read(listing.entries[0])
        yield made, lambda: made.read(listing.entries[0]) == before


@contextmanager
def archive(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    (folder / "archive").write_bytes(b"content")
    with ArchiveFile(folder / "archive") as made:
        yield made, lambda: made.read_at(7, 0) == b"content"


@contextmanager
def work_folder(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with WorkFolder(folder / "output") as made:
        yield made, lambda: made.remove() is None


@contextmanager
def remote(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with RemoteSource(ANY_PORT) as made:
        yield made, lambda: made.stats().batches == 0


@contextmanager
def receiver(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with FrameReceiver(ANY_PORT) as made:
        yield made, lambda: made.rejected == 0


@contextmanager
def single(make: Callable[[], Any], path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with ExitStack() as opened:
        made = make()
        if hasattr(made, "close"):
            opened.callback(made.close)
        yield made, lambda: True


REAL: dict[str, Callable[..., Any]] = {
    "loader": loader,
    "engine": engine,
    "dispatcher": partial(part_of_engine, lambda dispatcher: dispatcher),
    "worker": partial(part_of_engine, lambda dispatcher: dispatcher._workers[0]),
    "process": partial(part_of_engine, lambda dispatcher: dispatcher._workers[0].process),
    "channel": partial(part_of_engine, lambda dispatcher: dispatcher._workers[0].channel),
    "bell of an engine": partial(part_of_engine, lambda dispatcher: dispatcher.bell),
    "ring": partial(part_of_engine, lambda dispatcher: dispatcher._ring),
    "board": partial(part_of_engine, lambda dispatcher: dispatcher._status_table),
    "kept of a flow": kept_of_a_flow,
    "threads": threads,
    "read ahead": read_ahead,
    "pool": pool,
    "child": child,
    "LMDB shard": partial(shard, "lmdb"),
    "HDF5 shard": partial(shard, "hdf5"),
    "open shards": open_shards,
    "reader of an archive": opened_reader,
    "archive": archive,
    "work folder": work_folder,
    "remote source": remote,
    "receiver": receiver,
    "bell": partial(single, Bell),
    "clock": partial(single, CpuClock),
    "turns": partial(single, lambda: ExclusiveUse("test", lambda: None, lambda: None)),
    "descriptor": partial(single, lambda: Descriptor(os.open(os.devnull, os.O_RDONLY))),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", torture_except(REAL.values(), REAL["ring"]), ids=REAL.keys())
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
