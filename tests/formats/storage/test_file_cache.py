"""A cache has whole, verified files within its limit, each downloaded once for all readers."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from shardprep.formats import OperationError, UsageError, open_dataset, read_manifest
from shardprep.formats.runtime.files import publish_bytes
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.work_folder import CACHE_LOCK_NAME, WorkFolder
from shardprep.formats.shards.read import FileEntry
from shardprep.formats.storage import cache as file_cache, cache_folder, store
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.cache_folder import ArrivingFile, CacheBusy, CacheFolder, StillWaiting, hex_of
from shardprep.formats.storage.store import AnswerBroken, Location, RemoteDamaged, RemoteDenied, RetryPolicy
from shardprep.formats.storage.transfer import find_datasets
from support.datasets import flip, open_files
from support.faulty_proxy import HIDDEN, Proxy
from support.object_server import as_endpoint
from support.sampling import torture_except
from support.waiting import until

pytestmark = pytest.mark.usefixtures("proxy")

URL = "s3://bucket/shards/train"
Shards = tuple[FileEntry, ...]
PATIENT = RetryPolicy(retries=5, timeout_s=30.0)
SOON = RetryPolicy(retries=5, timeout_s=0.5)
ERRORS = [("flip", RemoteDamaged), ("403", RemoteDenied), ("cut", AnswerBroken)]


@pytest.fixture
def shards(bucket: Path) -> Shards:
    return read_manifest(bucket / "shards/train").shards


def opened(
    folder: Path, limit: int | None = None, patience_s: float = 60.0, policy: RetryPolicy = PATIENT
) -> FileCache:
    return FileCache(folder, limit, Location.parse(URL), policy=policy, patience_s=patience_s)


def files_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "files").glob("*/*")}


def names(entries: Shards) -> set[str]:
    return {hex_of(entry) for entry in entries}


@pytest.mark.parametrize(
    "fault", ["flip", "cut", *(pytest.param(f, marks=pytest.mark.slow) for f in ("short", "long", "stall"))]
)
def test_an_answer_that_is_wrong_once_is_fetched_anew(
    proxy: Proxy, tmp_path: Path, shards: Shards, fault: str
) -> None:
    proxy.fault = lambda path, count: fault if count == 1 else None

    with opened(tmp_path / "cache", policy=SOON) as cache, cache.hold(shards[:1]):
        assert files_in(tmp_path / "cache") == names(shards[:1])
    with LoopThread(1) as loop:
        assert loop.run(find_datasets(Location.parse(URL), SOON))[""].manifest.shards == shards


@pytest.mark.parametrize(("fault", "error"), torture_except(ERRORS, *ERRORS[:2]))
def test_an_answer_that_is_always_wrong_is_an_error_and_never_a_file_until_it_is_right_or_the_settings_are(
    proxy: Proxy, tmp_path: Path, shards: Shards, fault: str, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = shards[1]
    proxy.fault = lambda path, count: fault if path.endswith(bad.name) else None

    with opened(tmp_path / "cache") as cache:
        with pytest.raises(error) as caught:
            cache.hold(shards[:3])
        assert (caught.value.path, caught.value.shard) == (URL, bad.name)
        assert HIDDEN not in str(caught.value)
        assert hex_of(bad) not in files_in(tmp_path / "cache")
        assert not [*(tmp_path / "cache/parts").iterdir()]
        more = 8 if fault == "cut" else 0  # for what each half brings
        assert len(proxy.ranges_of(bad.name)) <= store.TRIES + more

        if fault == "403":  # settings are read again, as renewed credentials are
            as_endpoint(f"http://127.0.0.1:{proxy.server}", monkeypatch)
        else:
            proxy.fault = lambda path, count: None
        cache.hold(shards[:3]).release()


def test_all_files_stay_within_the_smallest_limit_of_the_readers(tmp_path: Path, shards: Shards) -> None:
    limit = sum(shard.size for shard in shards[:4])
    with opened(tmp_path / "cache") as generous, opened(tmp_path / "cache", limit) as strict:
        for shard in shards:
            with (generous if int(hex_of(shard), 16) % 2 else strict).hold([shard]):
                assert sum(path.stat().st_size for path in (tmp_path / "cache/files").glob("*/*")) <= limit
    with opened(tmp_path / "cache", shards[0].size):
        assert sum(path.stat().st_size for path in (tmp_path / "cache/files").glob("*/*")) <= shards[0].size


def test_readers_of_sets_that_exclude_each_other_all_come_to_their_end(
    bucket: Path, tmp_path: Path, shards: Shards
) -> None:
    largest = max(shard.size for shard in shards)
    place = Location.parse((bucket / "shards/train").as_uri())

    def read(seed: int) -> int:
        order, count = random.Random(seed), 0
        with FileCache(tmp_path / "cache", 4 * largest, place) as cache:
            for _ in range(12):
                with cache.hold(order.sample(shards, 3)) as held:
                    count += len(held.sizes)
        return count

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(read, range(4))] == [36] * 4


def test_what_is_used_last_is_evicted_and_nothing_that_is_used_sooner_for_a_file_ahead(
    tmp_path: Path, shards: Shards
) -> None:
    soon, later, last, never = shards[:4]
    with opened(tmp_path / "cache", sum(sorted(shard.size for shard in shards[:4])[-3:])) as cache:
        cache.announce([soon, later, last])
        cache.hold([soon, last]).release()

        assert cache.prefetch(later)
        assert not cache.prefetch(never)
        assert files_in(tmp_path / "cache") == names((soon, later, last))
        cache.announce([never, soon, later, last])
        assert not cache.prefetch(never, evict=False)
        assert files_in(tmp_path / "cache") == names((soon, later, last))

        cache.announce([soon, later, last])
        cache.hold([never]).release()
        assert last.size < never.size or files_in(tmp_path / "cache") == names((soon, later, never))
        cache.announce([last, later, soon])
        cache.record_position(2)
        cache.hold([last]).release()
        assert hex_of(soon) in files_in(tmp_path / "cache")

        cache.announce([soon, later, last, soon])
        cache.hold([soon, later, last]).release()
        cache.record_position(1)
        cache.hold([never]).release()
        assert files_in(tmp_path / "cache") == names((later, last, never))


def test_leftovers_of_dead_readers_go_and_files_of_others_stay(tmp_path: Path, shards: Shards) -> None:
    opened(tmp_path / "cache").close()
    left = [tmp_path / "cache/readers" / f"1-{0:016}", tmp_path / "cache/parts" / f"{hex_of(shards[0])}.part"]
    own = [tmp_path / "cache" / name for name in ("parts/my", "files/my", "files/ab/my", "readers/my")]
    own[2].parent.mkdir()
    for path in (*left, *own):
        path.write_bytes(b"x" * 100)

    with opened(tmp_path / "cache", shards[0].size) as cache:
        cache.hold(shards[:1]).release()

    assert [path.exists() for path in (*left, *own)] == [False] * 2 + [True] * 4


def test_a_cache_lists_only_folders_that_have_changed_but_those_at_once(tmp_path: Path) -> None:
    (cache := CacheFolder(tmp_path / "cache")).make()
    (file := cache.files / "00" / f"{0:064}").parent.mkdir()
    for number in range(200):
        file.unlink() if number % 2 else file.touch()
        assert len(cache.cached_files()) == 1 - number % 2
    os.utime(file.parent, ns=(1, 1))
    with patch.object(cache_folder, "_files_in", side_effect=[()]):  # once
        assert [*cache.cached_files(), *cache.cached_files()] == []


def test_a_file_is_whole_until_it_is_gone_so_that_a_killed_process_leaves_no_damaged_one(
    tmp_path: Path, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, sizes = Path.unlink, dict[str, int]()

    def noting(path: Path, missing_ok: bool = False) -> None:
        if path.parent.parent.name == "files":
            sizes[path.name] = path.stat().st_size
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noting)
    with opened(tmp_path / "cache", max(shard.size for shard in shards)) as cache:
        for shard in shards[:3]:
            cache.hold([shard]).release()
    assert sizes
    assert sizes.items() <= {hex_of(shard): shard.size for shard in shards}.items()


def test_a_download_that_is_given_up_while_another_process_opens_it_is_not_continued(
    tmp_path: Path, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as cache:
        first, really = ArrivingFile(cache.folder, shards[0]), os.open

        def opening(path: Path, *flags: int) -> int:
            descriptor = really(path, *flags)
            first.give_up()
            return descriptor

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opening)
            with pytest.raises(FileExistsError):
                ArrivingFile(cache.folder, shards[0])
        cache.hold(shards[:1]).release()


def test_closing_a_deleted_cache_ends_all_of_it(proxy: Proxy, tmp_path: Path, shards: Shards) -> None:
    threads = threading.active_count()
    cache = FileCache(tmp_path / "cache", None, Location.parse(URL), policy=RetryPolicy(0, 3600.0))
    cache.keep(cache.hold(shards[:1]))
    proxy.fault = lambda path, count: "stall"
    asked = len(proxy.asked)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(cache.hold, shards[1:2])
        until(lambda: len(proxy.asked) > asked)
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(OperationError, match="was deleted while it was in use"):
            cache.announce(shards)
        (tmp_path / "cache").mkdir()
        with pytest.raises(OperationError, match="was deleted while it was in use"):
            cache.hold(shards[2:3])
        cache.close()
        with pytest.raises(UsageError, match="closed"):
            work.result(60)
    cache.close()
    proxy.ended.set()
    until(lambda: threading.active_count() == threads)
    assert not open_files(tmp_path)


def test_a_closed_cache_tells_nothing_and_waits_for_nothing(tmp_path: Path, shards: Shards) -> None:
    limit = sum(shard.size for shard in shards[:2])
    cache = opened(tmp_path / "cache", limit)
    with opened(tmp_path / "cache", limit) as other, other.hold(shards[:2]), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.hold, shards[2:3])
        time.sleep(0.1)
        cache.close()
        calls = (
            lambda: cache.announce(shards), lambda: cache.record_position(1), lambda: cache.keep(cache.hold(shards[:1]))
        )  # fmt: skip
        for call in calls:
            with pytest.raises(UsageError, match="closed"):
                call()
        with pytest.raises(UsageError, match="closed"):
            waiting.result(60)
        assert len([*(tmp_path / "cache/readers").iterdir()]) == 1


def test_a_folder_that_can_be_no_cache_is_refused_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset").mkdir()
    for name in ("mine", "dataset/index.npy", "dataset/manifest.json"):
        (tmp_path / name).write_text("x")
    for wrong in (tmp_path, tmp_path / "mine", tmp_path / "dataset/new"):
        with pytest.raises(UsageError, match=r"not a cache|not a folder|in the folder of a dataset"):
            opened(wrong)
    monkeypatch.setattr(cache_folder, "filesystem_type", lambda path: "nfs4")
    with pytest.raises(UsageError, match="nfs4"):
        opened(tmp_path / "new/cache")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "dataset"}


def test_other_users_may_share_a_cache_or_an_output_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        opened(tmp_path / "cache").close()
        with WorkFolder(tmp_path / "output"):
            assert (tmp_path / "output/.prep/lock").stat().st_mode & 0o777 == 0o664
        os.umask(0o027)
        publish_bytes(tmp_path / "file", b"", tmp_path)
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o440
    finally:
        os.umask(before)
    assert (tmp_path / "cache" / CACHE_LOCK_NAME).stat().st_mode & 0o777 == 0o664
    with patch("os.open", side_effect=PermissionError(13, "")), pytest.raises(OperationError, match="umask"):
        CacheFolder(tmp_path / "cache").make()


def test_nothing_is_written_through_a_link_in_a_cache(tmp_path: Path, bucket: Path) -> None:
    log, manifest = tmp_path / "log", read_manifest(bucket / "shards/train")
    for make in (lambda: cache.folder.path.joinpath("replaced").symlink_to(log), lambda: os.mkfifo(log)):
        with opened(tmp_path / "cache") as cache:
            make()
            cache.hold(manifest.shards[:1]).release()
            flip(cache.folder.path_of(manifest.shards[0]), 5000)
            cache.hold_intact(manifest.shards[0]).release()
        assert not log.is_file()
    for folder in (cache.folder.dataset(manifest.root), cache.folder.readers):
        shutil.rmtree(folder, ignore_errors=True)
        folder.symlink_to(tmp_path)
        with pytest.raises(OperationError, match=f"{folder}: is a link where a folder belongs"):
            open_dataset(URL, cache=tmp_path / "cache")


def test_a_reader_file_with_anything_in_it_is_no_error(tmp_path: Path, shards: Shards) -> None:
    mark = "5348525052445231"
    with opened(tmp_path / "cache") as cache:
        for content in ("", "00" * 7, mark + "ff" * 16 + "01" * 13, "ff" * 64):
            with (cache.folder.readers / f"9-{0:016}").open("wb") as other:
                fcntl.flock(other, fcntl.LOCK_EX)  # as a reader that lives
                other.write(bytes.fromhex(content))
                other.flush()
                cache.hold(shards[:2]).release()
                flip(cache.folder.path_of(shards[0]), 5000)
                cache.hold_intact(shards[0]).release()


IN_TURN = """
from shardprep.formats.storage.cache_folder import CacheFolder
with CacheFolder(Path(sys.argv[1])).critical_section():
    print(flush=True)
    time.sleep(600)
"""
WAITING = """
import warnings
from shardprep.formats.storage import cache_folder
cache_folder.MAX_COUNTED_S = 0.1
warnings.showwarning = lambda *_: print(flush=True)
cache_folder.CacheFolder(Path(sys.argv[1]), patience_s=2.0).critical_section().__enter__()
"""
DOWNLOADING = """
from shardprep.formats import open_dataset
with open_dataset(sys.argv[2], cache=sys.argv[1]) as found:
    print(flush=True)
    found[0]
"""


@contextmanager
def frozen(program: str, cache: Path, stopped: Callable[[], object]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped when it has printed a line, and then something holds."""
    code = f"import sys, time\nfrom pathlib import Path\n{program}"
    with subprocess.Popen([sys.executable, "-c", code, str(cache), URL], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            until(stopped)
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def test_a_process_that_is_frozen_in_its_turn_is_waited_for_so_long(tmp_path: Path, shards: Shards) -> None:
    with opened(tmp_path / "cache", patience_s=0.6) as cache:
        cache.hold(shards[:1]).release()
        with frozen(IN_TURN, tmp_path / "cache", lambda: True):
            with (
                pytest.warns(StillWaiting, match=r"the lock on .*cache.lock"),
                pytest.raises(CacheBusy, match=r"no change for 0\.6 s.* lslocks names the process"),
            ):
                cache.hold(shards[1:2])
            cache.hold(shards[:1]).release()
            cache.close()
    with opened(tmp_path / "cache") as cache, cache.hold(shards[:2]):
        assert len([*(tmp_path / "cache/readers").iterdir()]) == 1


@pytest.mark.slow
def test_a_process_that_was_stopped_while_it_waited_for_its_turn_still_gets_it(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    folder.make()
    with ExitStack() as own:
        own.enter_context(folder.critical_section())
        with frozen(WAITING, folder.path, lambda: time.sleep(0.2) is None) as process:  # it pauses again
            time.sleep(2.0)
            own.close()
            process.send_signal(signal.SIGCONT)
            assert process.wait(60) == 0


def test_a_process_that_is_frozen_in_a_download_is_waited_for_so_long_and_one_that_lives_until_it_is_done(
    proxy: Proxy, tmp_path: Path, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = shards[0].name
    proxy.fault = lambda path, count: "stall" if path.endswith(bad) and count == 1 else None
    with (
        frozen(DOWNLOADING, tmp_path / "cache", lambda: proxy.ranges_of(bad)),
        opened(tmp_path / "cache", patience_s=0.6) as cache,
        pytest.warns(StillWaiting, match="another process downloads"),
        pytest.raises(CacheBusy, match=hex_of(shards[0])),
    ):
        cache.hold(shards[:1])

    touched: list[ArrivingFile] = []  # time passes for who waits only with these signs of life
    touch = ArrivingFile.touch
    monkeypatch.setattr(file_cache, "ALIVE_S", 0.02)
    monkeypatch.setattr(ArrivingFile, "touch", lambda file: (touch(file), touched.append(file)))
    monkeypatch.setattr(cache_folder, "time", Mock(wraps=time, monotonic=lambda: len(touched)))
    proxy.asked.clear()
    with (
        opened(tmp_path / "cache") as slow,
        opened(tmp_path / "cache", patience_s=15) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(slow.hold, shards[:1])
        until(lambda: proxy.ranges_of(bad))
        second = pool.submit(other.hold, shards[:1])
        until(lambda: len(touched) > 20)
        proxy.ended.set()
        first.result(60).release()
        second.result(60).release()
