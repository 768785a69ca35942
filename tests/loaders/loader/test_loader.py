"""A loader in use: forms of batches, held batches, processes; and errors, which lose nothing else."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset, read_manifest
from shardprep.formats.errors import (
    CorruptRecord,
    ManifestDamaged,
    OperationError,
    ShardDamaged,
    ShardprepError,
    UsageError,
    WorkerDied,
)
from shardprep.formats.shards import columns as shard_cache
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle, SlotsHeld, TrainTransform, TransformInput
from shardprep.loaders.engine.dispatcher import POLL_INTERVAL_S
from shardprep.loaders.loader.ahead import ReadAhead
from shardprep.loaders.loader.work import Subset
from shardprep.loaders.measuring import tracing
from shardprep.loaders.order.epoch import Epoch
from shardprep.loaders.transforms.decode import decode_rgb
from support.datasets import converted, flip, is_root, open_files
from support.engine_workers import Once, kill, leave, sleep_for_ever
from support.loaded import Kept, assert_exactly_once, assert_same, epoch_of, numbers_in
from support.loader_workers import CutShort, Misdeclared, OwnError, Tagging, fail, nap, nothing, reject
from support.sampling import torture_except
from support.waiting import until

loader_on = partial(Loader, batch_size=10, workers=0, with_numbers=True)
two_workers_on = partial(loader_on, workers=2, drop_last=False)


def test_unlabelled_images_have_the_label_minus_one(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "test", split="test")

    with loader_on(tmp_path / "test", labels="sorted_wnid1_bg", drop_last=False) as loader:
        ((_, labels, _),) = loader

    assert labels.tolist() == [-1, -1, -1]


def test_a_loop_that_drops_its_batches_never_makes_the_loader_copy(lmdb_shards: Path) -> None:
    before = sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns
    with loader_on(lmdb_shards, transform=Tagging(), workers=2, slots=3) as loader:
        for crc, *_ in loader:
            assert crc.ctypes.data % 64 == 0
        stats = loader.stats()

    assert (stats.rows, stats.batches, stats.restarts, stats.copied) == (200, 20, 0, 0)
    assert (sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns) == before
    assert stats.stages.keys() == {"read", "decode", "augment"}
    assert 0 < stats.stages["augment"] < sum(stats.filling)


def test_a_batch_size_beyond_the_dataset_takes_memory_for_the_dataset_only(lmdb_shards: Path) -> None:
    with two_workers_on(lmdb_shards, batch_size=100_000, transform=TrainTransform(8)) as loader:
        ((images, _, numbers),) = loader
        assert loader.engine.shared_bytes < 1 << 20
        assert min(loader.stats().stages.values()) > 0  # of reading, decoding and augmenting

    assert images.shape == (len(loader.dataset), 8, 8, 3)
    assert sorted(numbers) == list(range(len(loader.dataset)))


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_and_closing_end_an_iteration_and_batches_stay(workers: int, lmdb_shards: Path) -> None:
    loader = loader_on(lmdb_shards, workers=workers, batch_size=5)
    next(ended := iter(loader))
    images, _, numbers = loader.first_batch()
    with pytest.raises(UsageError, match="another iteration of this Loader has begun"):
        next(ended)
    next(batches := iter(loader))
    loader.close()
    loader.close()
    with pytest.raises(ShardprepError, match="the Loader was closed while it ran"):
        next(batches)
    with pytest.raises(UsageError, match="this Loader is closed; make a new one"):
        next(iter(loader))
    assert images == [open_dataset(lmdb_shards)[int(n)].image for n in numbers]


@pytest.mark.slow
def test_batches_never_change_however_many_are_held_and_outlive_the_loader(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=Tagging(), workers=2, slots=4, shuffle=GlobalShuffle()) as loader:
        with pytest.warns(SlotsHeld, match="raise `slots`"):
            held = list(loader)
        again = epoch_of(loader)
        loader.set_epoch(0)
        fresh = epoch_of(loader)
        assert loader.stats().copied > 0

    assert len(held) == 20
    assert_same(held, fresh)
    assert numbers_in(fresh) != numbers_in(again)


def test_rank_and_world_size_come_from_a_launcher(lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")

    with loader_on(lmdb_shards, batch_size=4) as loader:
        _, _, numbers = next(iter(loader))
        assert len(loader) == 17

    assert numbers.tolist() == [4, 5, 6, 7]


def test_loading_in_this_process_leaves_the_threads_of_opencv_alone(lmdb_shards: Path) -> None:
    threads = cv2.getNumThreads()
    cv2.setNumThreads(3)
    try:
        with loader_on(lmdb_shards) as loader:
            for _ in loader:
                assert cv2.getNumThreads() == 3
    finally:
        cv2.setNumThreads(threads)


def test_the_first_batches_of_the_next_epoch_are_made_before_it_begins(lmdb_shards: Path) -> None:
    small = partial(loader_on, lmdb_shards, transform=TrainTransform(8))
    with small() as plain, small(workers=1, slots=6) as loader, tracing(loader) as trace:
        for expected in (0, 1, 0, 0, 1):  # also where another epoch, or single steps, are asked for
            plain.set_epoch(expected)
            loader.set_epoch(expected)
            assert_same(epoch_of(loader), epoch_of(plain))
            assert loader.receipt() == plain.receipt()
            until(lambda: loader.engine.ready == 6)
            stats = loader.stats()
            time.sleep(2 * POLL_INTERVAL_S)
            assert loader.stats() == stats
        steps = [event for event in trace.events() if event.get("name") == "step"]
        leases = [event for event in trace.events() if event.get("cat") == "lease"]
        assert {event["args"]["batch"] for event in steps} <= {event["args"]["batch"] for event in leases}
        assert len(steps) == 5 * (len(plain) - 1)
        assert_same([loader.first_batch()], [plain.first_batch()])
        for step, _ in enumerate(loader):
            if step == len(plain) - 1:  # then the loader does not work ahead
                loader.first_batch()
        plain.set_epoch(loader.epoch)
        assert_same(epoch_of(loader), epoch_of(plain))
        for step, _ in enumerate(loader):
            if step == len(plain) - 1:
                loader.close()


def test_a_forked_copy_of_an_iterator_is_refused(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                next(batches)
            except UsageError:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        rest = sum(1 for _ in batches)

    assert os.waitstatus_to_exitcode(status) == 0
    assert rest == len(loader) - 1


@pytest.mark.slow
@pytest.mark.skipif(not is_root(), reason="needs leave to become another user")
def test_datasets_that_are_only_readable_can_be_loaded(lmdb_shards: Path, hdf5_shards: Path) -> None:
    code = """
import os, sys
from shardprep.formats import fetch
from shardprep.loaders import Loader
for user in 0, 65534:  # once as root, to have everything imported
    os.setresuid(user, user, user)
    for path in sys.argv[1:]:
        with Loader(path, batch_size=100, workers=0) as loader:
            print(len(list(loader)))
        print(fetch(f"file://{path}", path)[0].fetched)
"""
    with TemporaryDirectory() as folder:
        paths = [shutil.copytree(path, Path(folder) / path.name) for path in (lmdb_shards, hdf5_shards)]
        for path in (*paths, Path(folder)):
            path.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("2\n()\n" * 4, "")


def test_the_package_limits_opencv_before_opencv_is_imported() -> None:
    code = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "cv2":
            print(os.environ.get("OPENCV_IO_MAX_IMAGE_PIXELS"))

sys.meta_path.insert(0, Watch())
import shardprep.loaders.transforms.transforms
"""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OPENCV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    assert set(done.stdout.split()) == {str(1 << 26)}


@pytest.mark.parametrize("read_ahead", [0, 1, 1 << 40])
def test_reading_ahead_changes_nothing_but_the_time(
    lmdb_shards: Path, read_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lmdb_shards.parent)
    with loader_on(Path("lmdb"), shuffle=LocalShuffle(20), read_ahead=read_ahead, drop_last=False) as loader:
        monkeypatch.chdir(tmp_path)  # a relative path stays good
        assert_exactly_once(loader, epoch_of(loader))


def test_steps_left_out_are_not_read_ahead(lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, names = set[str](), [shard.name for shard in read_manifest(lmdb_shards).shards]
    monkeypatch.setattr(ReadAhead, "_request", lambda _, path, *place: asked.add(path.name))
    with loader_on(lmdb_shards, shuffle=None, read_ahead=1) as loader:
        steps = loader.steps(0, [0, len(loader) - 1])
        assert [next(steps).step, next(steps).step] == [0, len(loader) - 1]
        until(lambda: names[-1] in asked)
    assert names[len(names) // 2] not in asked


def test_an_epoch_a_folder_and_slots_that_cannot_be_meant_are_errors_at_once(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    with loader_on(lmdb_shards) as loader:
        for epoch in (-1, 1 << 64):
            with pytest.raises(UsageError, match="epoch must be"):
                loader.set_epoch(epoch)
        assert loader.epoch == 0
    with pytest.raises(ManifestDamaged):
        Loader(tmp_path)
    with pytest.raises(OperationError, match="slots"):
        Loader(lmdb_shards, batch_size=200, transform=TrainTransform(224), workers=1, slots=10**7)


Rng = np.random.Generator


def parts(record: TransformInput, rng: Rng) -> Any:
    image = np.resize(decode_rgb(record.image), (16, 16, 3)) * np.float32(rng.random())
    return image, rng.random(), np.int16(record.label), record.label > 1


@pytest.mark.torture
def test_results_are_the_same_written_by_workers_sent_by_them_or_made_here(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for workers in (0, 1):
        with loader_on(lmdb_shards, transform=parts, workers=workers) as loader:
            expected = [loader.replay(0, step).batch for step in range(len(loader))]
            assert_same(epoch_of(loader), expected)
            for batch in loader._batches([(Epoch(loader._plan, 0), [0])]):  # now no result is sent
                assert not batch.payloads
                assert [array.ctypes.data % 64 for array in batch.arrays.values()] == [0] * 4
            assert workers <= loader.engine.shared_bytes < 64 << 20  # of the rows that were written
    assert [part.dtype for part in expected[0]] == ["f4", "f8", "i2", "?", "i8", "i8"]
    assert loader.engine.shared_bytes == 0

    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 40, 1 << 40))
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert loader.engine.layout.inputs == 0
        assert_same(epoch_of(loader), expected)


def pixels(record: TransformInput, rng: Rng) -> Any:
    return decode_rgb(record.image) if rng.random() < 0.95 else np.zeros(32 << 20, np.uint8)


def test_results_of_usual_sizes_are_passed_in_shared_memory(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=pixels, workers=1) as loader:
        sizes = [sorted(each.nbytes for each in list.copy(images)) for images, *_ in loader]  # lists
        assert sum(sizes[0][:-1]) < loader.engine.shared_bytes < sum(map(sum, sizes)) / 2


@pytest.fixture
def dataset(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    """A copy of a dataset that may be damaged."""
    shutil.copytree(lmdb_shards, tmp_path / "copy")
    return tmp_path / "copy"


def damage(path: Path, *numbers: int) -> None:
    """Flip a bit of each of these records' images."""
    with open_dataset(path) as dataset:
        for number in numbers:
            shard = path / dataset.manifest.shards[int(dataset.index["shard"][number])].name
            flip(shard, shard.read_bytes().index(dataset[number].image) + 50)


@pytest.fixture
def whole(lmdb_shards: Path) -> list[Kept]:
    """An undisturbed epoch of Tagging in stored order."""
    with two_workers_on(lmdb_shards, transform=Tagging(), workers=0) as loader:
        return epoch_of(loader)


@pytest.mark.slow
def test_after_an_error_the_next_epoch_goes_well(dataset: Dataset, tmp_path: Path) -> None:
    once = Once(tmp_path / "once", fail)
    with two_workers_on(dataset.path, transform=Tagging({dataset[25].key: once})) as loader:
        with pytest.raises(OwnError):
            epoch_of(loader)
        assert loader.epoch == 1
        assert_exactly_once(loader, epoch_of(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_flipped_bit_is_an_error_with_shard_and_key(copy: Path, workers: int) -> None:
    damage(copy, 31)

    with (
        open_dataset(copy) as dataset,
        two_workers_on(copy, transform=TrainTransform(8), workers=workers) as loader,
    ):
        batches = iter(loader)
        assert numbers_in(epoch_of(batches, 3)) == list(range(30))
        with pytest.raises(CorruptRecord) as raised:
            next(batches)
        assert raised.value.key == loader.key(31)
        assert raised.value.shard == dataset.manifest.shards[int(dataset.index["shard"][31])].name


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_skipped_on_request_listed_and_accounted_for(copy: Path, workers: int) -> None:
    damage(copy, 31, 33)
    with open_dataset(copy) as dataset:
        undecodable = Tagging({dataset.index["key"][n].decode(): reject for n in range(50, 60)})
    with two_workers_on(copy, transform=undecodable, on_bad_record="skip", workers=workers) as loader:
        batches = epoch_of(loader)
        skipped, receipt = loader.skipped, loader.receipt()
        keys = [loader.key(n) for n in (31, 33, *range(50, 60))]

    assert len(batches) == 21
    assert batches[3][-1].tolist() == [30, 32, 34, 35, 36, 37, 38, 39]
    assert [len(part) for part in batches[5]] == [0] * 5
    assert sorted(skipped) == sorted(keys)
    assert "CRC-32C" in skipped[keys[0]]
    assert skipped[keys[-1]] == "does not decode"
    receipt.check(204, skipped=12)


@pytest.mark.slow
@pytest.mark.parametrize("container", torture_except(["lmdb", "hdf5"], "lmdb"))
def test_a_shard_cut_short_under_its_reader_is_an_error_and_the_parent_lives(
    container: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shutil.copytree(request.getfixturevalue(f"{container}_shards"), tmp_path / "copy")
    with open_dataset(tmp_path / "copy") as dataset:
        key, first = dataset[0].key, dataset.path / dataset.manifest.shards[0].name

    with (
        two_workers_on(tmp_path / "copy", transform=Tagging({key: CutShort(first)}), workers=1) as loader,
        pytest.raises(ShardDamaged) as raised,
    ):
        epoch_of(loader)

    assert first.name in str(raised.value)
    assert loader.stats().restarts == 0


@pytest.mark.torture
def test_a_shard_that_is_replaced_by_an_equal_one_changes_nothing(copy: Path) -> None:
    with two_workers_on(copy, transform=Tagging({"": nap}), workers=1, slots=3) as loader:
        batches = iter(loader)
        delivered = epoch_of(batches, 2)
        for shard in copy.glob("shard-*"):
            shutil.copy(shard, copy / "new")
            (copy / "new").replace(shard)
        assert_exactly_once(loader, delivered + epoch_of(batches))


@pytest.mark.parametrize(("workers", "kills"), torture_except([(2, 2), (1, 10), (4, 20)], (2, 2)))
def test_killed_workers_lose_and_repeat_nothing(
    dataset: Dataset, whole: list[Kept], tmp_path: Path, workers: int, kills: int
) -> None:
    keys = random.Random(0).sample([dataset[n].key for n in range(204)], kills)
    deaths = {key: Once(tmp_path / key.replace("/", "-"), kill) for key in keys}
    with two_workers_on(dataset.path, transform=Tagging(deaths), workers=workers) as loader:
        batches = epoch_of(loader)
        assert_exactly_once(loader, batches)
        assert loader.stats().restarts == kills

    assert_same(batches, whole)


@pytest.mark.torture
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (kill, r"3 workers ended at it, the last by SIGKILL\. After SIGKILL, give more memory"),
        (leave, "exit code 0"),
        (sleep_for_ever, r"no progress for 0.3 s\. .* a longer deadline"),
    ],
)
def test_a_record_that_ends_every_worker_is_named(dataset: Dataset, end: Any, cause: str) -> None:
    key, deadline = dataset[25].key, 0.3 if end is sleep_for_ever else None
    with two_workers_on(dataset.path, transform=Tagging({key: end}), deadline=deadline) as loader:
        batches = iter(loader)
        assert numbers_in(epoch_of(batches, 2)) == list(range(20))
        with pytest.raises(WorkerDied, match=cause) as raised:
            next(batches)
        assert raised.value.key == key
        assert loader.state_dict()["place"] == 20


@pytest.mark.slow
def test_a_transform_that_cannot_be_found_in_a_worker_is_an_error_and_no_hang(lmdb_shards: Path) -> None:
    with (
        two_workers_on(lmdb_shards, transform=Vanishing(), workers=1) as loader,
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
    ):
        next(iter(loader))


class Vanishing(Tagging):
    """A transform that unpickles as a name that workers cannot import."""

    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)


@pytest.mark.parametrize(
    ("transform", "message", "at"),
    [
        (nothing, "returned None", 0),
        (Misdeclared(), r"declares uint8\[3\] and returns uint8\[4\]", 0),
        (partial(lambda made, *_: next(made, ()), iter([(0,)])), "different numbers of parts: 0 and 1", 1),
    ],
)
def test_a_transform_that_breaks_its_word_is_an_error_with_the_key(
    lmdb_shards: Path, transform: Any, message: str, at: int
) -> None:
    with two_workers_on(lmdb_shards, transform=transform, workers=0) as loader:
        with pytest.raises(UsageError, match=message) as raised:
            next(iter(loader))
        assert raised.value.key == loader.key(at)


@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_a_record_that_is_intact_but_another_one_is_an_error(
    container: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    items_at = Subset.items_at

    def with_another_crc(*given: Any) -> Any:
        items = items_at(*given)
        items["crc32c"][3] ^= 1
        return items

    monkeypatch.setattr(Subset, "items_at", with_another_crc)
    with (
        two_workers_on(request.getfixturevalue(f"{container}_shards"), workers=0) as loader,
        pytest.raises(CorruptRecord, match="record 3 does not match its CRC-32C"),
    ):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize(("container", "limit"), [("lmdb", 3), ("lmdb", 6), ("hdf5", 3)])
def test_few_shards_are_open_at_once_and_none_when_the_epoch_is_over(
    container: str, limit: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "MAX_OPEN", limit)
    path = request.getfixturevalue(f"{container}_shards")
    with two_workers_on(path, workers=0, shuffle=GlobalShuffle(), batch_size=1) as loader:
        before, most = open_files(path), 0
        for _ in loader:
            most = max(most, open_files(path) - before)

    assert most == min(limit, len(list(path.glob("shard-*"))))
    assert open_files(path) == 0
