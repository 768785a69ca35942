"""A dataset at a URL is the dataset in the folder that was published, through a cache that may be smaller."""

import gc
import json
import multiprocessing
import pickle
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from shardprep.formats import Dataset, UsageError, open_dataset, verify
from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.shards import columns
from shardprep.formats.shards.read import ShardFile
from shardprep.formats.storage.cache import CachedDataset, CacheTooSmall, FileCache, HeldFiles
from support.datasets import StopAfter, prep_here, tree
from support.faulty_proxy import HIDDEN, Proxy
from support.object_server import HIDDEN as SECRET_KEY
from support.resealed import reseal
from support.sampling import torture_except
from support.waiting import interrupt, until

TRAIN = "s3://bucket/shards/train"


def said_by(dataset: Dataset) -> list[object]:
    """All that a dataset's records are."""
    columns = dataset.columns.names
    return [(*record, [repr(record.columns[name]) for name in columns]) for record in dataset]


@pytest.fixture
def remote(proxy: Proxy, bucket: Path, tmp_path: Path) -> Iterator[CachedDataset]:
    """The dataset train, with a cache for about a fifth of it."""
    size = sum(path.stat().st_size for path in (bucket / "shards/train").iterdir())
    with open_dataset(TRAIN, cache=tmp_path / "cache", cache_limit=size // 5) as found:
        assert isinstance(found, CachedDataset)
        yield found


@pytest.mark.parametrize("name", torture_except(["shards/train", "columns"], "columns"))
def test_every_record_and_column_is_that_of_the_published_dataset(
    bucket: Path, proxy: Proxy, tmp_path: Path, name: str
) -> None:
    local = open_dataset(bucket / name)
    limit = local.manifest.size // 2

    with open_dataset(f"s3://bucket/{name}", cache=tmp_path / "cache", cache_limit=limit) as remote:
        assert said_by(remote) == said_by(local)
        assert said_by(remote) == said_by(local)
        assert (len(remote), remote.manifest) == (len(local), local.manifest)
        for column in local.schema.names:
            assert (remote.columns.lengths(column) == local.columns.lengths(column)).all()
    remote.close()
    local.close()


def test_its_pickle_opens_the_same_dataset_and_no_file_shows_a_secret(
    remote: CachedDataset, proxy: Proxy, tmp_path: Path
) -> None:
    first, asked = remote[0], len(proxy.asked)
    stored = pickle.dumps(remote)

    with pickle.loads(stored) as again:  # noqa: S301
        assert again[0] == first
        assert len(proxy.asked) == asked
        assert repr(again) == repr(remote)

    assert SECRET_KEY.encode() not in stored
    assert TRAIN in repr(remote)
    assert len([*remote]) == len(remote)
    for path in (tmp_path / "cache").rglob("*"):
        assert SECRET_KEY not in str(path)
        if path.is_file() and path.parent.parent.name != "files":
            assert SECRET_KEY.encode() not in path.read_bytes()


def test_a_cache_that_was_deleted_after_the_dataset_was_closed_is_made_again_once_for_all_threads(
    remote: CachedDataset, tmp_path: Path
) -> None:
    first, together = remote[0], threading.Barrier(8)
    remote.close()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(OperationError, match="was deleted while it was in use; start again"):
        columns.OpenRecords([remote.parts[0].files("sorted_wnid0")], HeldFiles(FileCache, most=0))[0]

    def cache(_: int) -> FileCache:
        together.wait()
        return remote.cache

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(cache, range(8))}) == 1
    assert len([*(tmp_path / "cache/readers").iterdir()]) == 1
    assert remote[0] == first


def test_opening_a_shard_checks_few_others(remote: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[ShardFile] = []
    monkeypatch.setattr(ShardFile, "is_deleted", property(checked.append))
    monkeypatch.setattr(columns, "CHECKED", 2)
    assert len(list(remote)) > 0
    assert len(checked) < 3 * len(remote.manifest.shards)


def test_a_thread_reads_one_shard_while_another_thread_downloads_the_next(
    remote: CachedDataset, bucket: Path, proxy: Proxy
) -> None:
    asked, released = proxy.block(remote.manifest.shards[0].name)
    with open_dataset(bucket / "shards/train") as local, ThreadPoolExecutor(2) as pool:
        first = pool.submit(remote.__getitem__, 0)
        assert asked.wait(60)
        assert pool.submit(remote.__getitem__, len(remote) - 1).result(60) == local[len(local) - 1]
        assert not first.done()
        released.set()
        assert first.result(60) == local[0]


def test_threads_that_read_through_a_cache_for_one_shard_take_turns(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    local = open_dataset(bucket / "shards/train")
    manifest, expected = local.manifest, [*local]
    least = max(shard.size for shard in manifest.shards) + sum(table.size for table in manifest.tables)
    numbers = [7 * read % len(expected) for read in range(60)]

    with (
        open_dataset(TRAIN, cache=tmp_path / "cache", cache_limit=least) as remote,
        ThreadPoolExecutor(8) as pool,
    ):
        assert [*pool.map(remote.__getitem__, numbers)] == [expected[number] for number in numbers]
    local.close()


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (TRAIN, {}, "--cache"),
        ("here", {"cache": "cache"}, "is not a URL"),
        ("here", {"cache_limit": 1}, "is not a URL"),
        (TRAIN, {"cache": "cache", "cache_limit": "200"}, "cache_limit"),
        (TRAIN, {"cache": "cache", "cache_limit": 0}, "cache_limit"),
        (TRAIN, {"cache": "cache", "cache_limit": True}, "cache_limit"),
        ("s3://bucket/shards", {"cache": "cache"}, "give one of them, such as s3://bucket/shards/train"),
        ("s3://key:hunter2@bucket/train", {"cache": "cache"}, "has a user"),
        ("s3://key:hunter2@bucket/train", {}, "has a user"),
    ],
)
def test_what_has_no_meaning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=said) as caught:
        open_dataset(path, **options)  # type: ignore[arg-type]

    assert "hunter2" not in str(caught.value)


def test_a_cache_that_is_too_small_for_the_tables_is_an_error_and_leaves_no_reader(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    hostile = Path(shutil.copytree(bucket / "columns", tmp_path / "hostile"))
    reseal(hostile, lambda manifest: manifest["tables"][0].update(size=1 << 60))
    with pytest.raises(CacheTooSmall, match="1,000 bytes"):
        open_dataset(TRAIN, cache=tmp_path / "cache", cache_limit=1000)
    with pytest.raises(CacheTooSmall, match="needs at least 1,152,921,504,60"):
        open_dataset(hostile.as_uri(), cache=tmp_path / "cache")
    assert not [*(tmp_path / "cache/readers").iterdir()]


def first_in_copy(queue: "SimpleQueue[str]", dataset: Dataset) -> None:
    try:
        queue.put(dataset[0].key)
        queue.put(dataset[len(dataset) - 1].key)
    except ShardprepError as error:
        queue.put(str(error))


def test_a_forked_copy_reads_what_is_there_and_gets_an_error_for_the_rest(remote: CachedDataset) -> None:
    key = remote[0].key
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=first_in_copy, args=(queue, remote))

    child.start()
    child.join(60)

    assert child.exitcode == 0
    assert queue.get() == key
    assert "spawn" in queue.get()
    assert remote[0].key == key


@pytest.mark.parametrize("level", torture_except(["quick", "full", "decode"], "quick", "full"))
@pytest.mark.parametrize("name", torture_except(["shards/train", "columns"], "columns"))
def test_verify_passes_a_dataset_through_a_smaller_cache(
    bucket: Path, proxy: Proxy, tmp_path: Path, name: str, level: str
) -> None:
    local = verify(bucket / name, level=level)
    assert local.manifest is not None

    cached = {"cache": tmp_path / "cache", "cache_limit": local.manifest.size // 2}
    report = verify(f"s3://bucket/{name}", level=level, workers=2, **cached)  # type: ignore[arg-type]

    assert report.to_json() == local.to_json() | {"dataset": f"s3://bucket/{name}"}


def test_verify_and_inspect_take_a_url_with_a_cache_and_say_what_to_do_without_one_and_for_damage(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    cache = ("--cache", tmp_path / "cache", "--cache-limit", "10MiB")

    one = prep_here("verify", TRAIN, *cache, "--quiet")
    all_of_them = prep_here("verify", "s3://bucket/shards", *cache, "--json", "--quiet")
    inspected = prep_here("inspect", TRAIN, *cache, "--json")
    local = prep_here("inspect", bucket / "shards/train", "--json")

    assert (one.returncode, all_of_them.returncode, inspected.returncode) == (0, 0, 0), one.stderr
    assert f"{TRAIN}: intact" in one.stdout
    names = [f"s3://bucket/shards/{split}" for split in ("train", "val", "test")]
    assert [split["dataset"] for split in json.loads(all_of_them.stdout)["splits"]] == names
    assert json.loads(inspected.stdout) == json.loads(local.stdout) | {"path": TRAIN}

    proxy.fault = lambda path, count: "flip" if path.endswith("shard-00001.h5") else None
    without = prep_here("verify", TRAIN)
    needless = prep_here("inspect", tmp_path, *cache)
    damaged = prep_here("verify", TRAIN, "--cache", tmp_path / "other", "--quiet")
    cached = prep_here("verify", TRAIN, *cache, "--quiet")  # an intact copy of the file
    assert (without.returncode, needless.returncode, damaged.returncode) == (2, 2, 1)
    assert "--cache" in without.stderr
    assert "SHA-256; publish it there again, unless another dataset has replaced it" in damaged.stdout
    assert cached.stdout == damaged.stdout
    assert HIDDEN not in damaged.stdout + damaged.stderr
    assert tree(tmp_path / "other/files")


def test_a_dataset_that_is_dropped_or_interrupted_while_it_closes_leaves_no_thread(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    dropped = open_dataset(TRAIN, cache=tmp_path)

    with pytest.raises(KeyboardInterrupt), open_dataset(TRAIN, cache=tmp_path / "other"):
        interrupt(monkeypatch, HeldFiles, "_release_all")
    del dropped

    until(lambda: gc.collect() >= 0 and threading.active_count() <= threads)  # earlier ones may end, too


def test_an_interrupted_verification_does_not_wait_for_its_downloads(proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = lambda path, count: "stall" if path.endswith("shard-00001.h5") else None

    with pytest.raises(KeyboardInterrupt):
        verify(TRAIN, cache=tmp_path, workers=2, progress=StopAfter(1))  # or it would take all retries
