"""``prep bench-disk`` on real files, and the profile that it saves: consistent, whole, or refused."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest

from shardprep.cli.commands.bench import disk_sentence
from shardprep.formats import DataError, UnknownVersion, WorkerDied, write_dataset
from shardprep.formats.runtime.files import filesystem_type
from shardprep.loaders.measuring.disk import (
    DIRECT,
    FADVISE,
    ColdMode,
    DiskProfile,
    Missing,
    OpenFiles,
    Pattern,
    Reading,
    Reads,
    find_cold_mode,
    read,
)
from support.datasets import is_root, prep, prep_here
from support.disk_profiles import documented_paths, full_profile, paths_of, rate
from support.process_table import children, text_of
from support.sampling import needs_mounts
from support.scripts import session_of
from support.waiting import until

SIZES = (1_000_000, 10_000, 333_333)
AT_START = np.zeros((8, 2), np.int64)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def files(tmp_path: Path, stack: ExitStack) -> OpenFiles:
    """Three files of odd sizes, of noise, flushed."""
    paths = [tmp_path / f"{number}.bin" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(np.random.default_rng(size).bytes(size))
    os.sync()
    return OpenFiles.of(paths, stack)


@pytest.mark.slow
def test_mapped_pages_are_not_called_cold(files: OpenFiles, tmp_path: Path) -> None:
    if find_cold_mode(files, filesystem_type(tmp_path)).method != FADVISE:
        pytest.skip("the page cache of this file system cannot be emptied")
    reading = Reading("", files, ColdMode(FADVISE), Pattern(65536))
    with mmap.mmap(files.descriptors[0], 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) > 0
        reading.round(1)
        way = find_cold_mode(files, filesystem_type(tmp_path))
    assert [rate is None for rate in reading.rates] == [True, False]  # cold, warm
    assert way.method in (DIRECT, None)
    assert "stayed in memory" in (way.reason or "")

    reading.round(1)
    assert reading.rates[0]


def test_o_direct_takes_the_place_of_dropping(files: OpenFiles) -> None:
    with mmap.mmap(files.descriptors[0], 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) > 0
        if find_cold_mode(files, "").method != DIRECT:
            pytest.skip("no O_DIRECT here")
    for pattern in (Pattern(65536), Pattern.of_records(5000, depth=3)):
        reading = Reading("", files, ColdMode(DIRECT), pattern)
        reading.round(1)
        assert [rate is None for rate in reading.rates] == [False, False]  # cold, warm
        assert reading.rates[0].method.endswith("O_DIRECT")  # type: ignore[union-attr]


def test_files_that_cannot_be_mapped_count_as_warm_once_they_are_read(stack: ExitStack) -> None:
    files = OpenFiles.of([Path("/sys/kernel/uevent_seqnum")], stack)
    mode = find_cold_mode(files, "sysfs")
    reading = Reading("", files, mode, Pattern(4096))
    reading.round(0)
    assert [rate is None for rate in reading.rates] == [True, False]  # cold, warm
    assert mode == (None, "it cannot be mapped, and it cannot be read with O_DIRECT")


@pytest.mark.parametrize("depth", [1, 4])
def test_what_cannot_be_read_is_the_systems_error(tmp_path: Path, stack: ExitStack, depth: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    opened = OpenFiles.of([tmp_path, tmp_path / "fifo"], stack)  # without a writer

    with pytest.raises(IsADirectoryError):
        read(opened.descriptors[:1], AT_START, Pattern(4096, depth), seconds=1e6)


def test_one_of_the_reading_processes_that_is_killed_before_it_is_ready_is_told(files: OpenFiles) -> None:
    before = children()

    def kill() -> None:
        lists: list[str] = []
        while not any(lists):
            lists = [text_of(Path(f"/proc/{pid}/task/{pid}/children")) for pid in children() - before]
        os.kill(int(" ".join(lists).split()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDied, match="ended early"):
        read(files.descriptors, AT_START, Pattern(64 << 20, depth=4), seconds=0.1)
    killer.join()


@pytest.mark.slow
def test_printed_keys_are_the_documented_ones(lmdb_shards: Path, tmp_path: Path) -> None:
    write_dataset([np.zeros(9000)] * 4, tmp_path / "items")  # without images
    paths = lmdb_shards, tmp_path / "items"
    done = [prep("bench-disk", path, "--seconds", 0, "--json", check=True).stdout for path in paths]
    value, items = map(json.loads, done)
    assert 72_000 < items["record_bytes"] < 90_000 < items["bytes"]

    printed, documented = set(paths_of(value)), documented_paths("bench-disk", "measurement")
    absent = {path for path in printed - documented if any(d.startswith(f"{path}.") for d in documented)}

    assert printed - documented == absent  # null, where the file system has no cold figures
    assert {d for d in documented - printed if not d.startswith(tuple(f"{a}." for a in absent))} == set()


def one_line(stderr: str) -> str:
    assert (stderr[:6], len(stderr.splitlines())) == ("prep: ", 1)
    return stderr


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("missing", ["--seconds", "0"], 2, "does not exist"),
        ("empty", ["--seconds", "0"], 2, "is empty"),
        ("fifo", ["--seconds", "0"], 2, "neither a file nor a folder"),
        ("damaged", ["--seconds", "0"], 1, "not JSON"),
        (".", ["--save", "/nowhere/disk.json"], 3, ""),
        (".", ["--seconds", "-1"], 2, ""),
        (".", ["--record-bytes", "0"], 2, ""),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_told_in_one_line_before_anything_is_written(
    tmp_path: Path, name: str, words: list[str], code: int, says: str
) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    before = sorted(tmp_path.iterdir())

    done = prep_here("bench-disk", tmp_path / name, *words)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in one_line(done.stderr)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.torture
def test_a_file_size_limit_stops_a_folder_and_not_a_dataset(lmdb_shards: Path, tmp_path: Path) -> None:
    limit = ["prlimit", "--fsize=10000"]

    folder = prep("bench-disk", tmp_path, "--seconds", 0, prefix=limit)
    dataset = prep("bench-disk", lmdb_shards, "--seconds", 0, "--json", prefix=limit, check=True)

    assert folder.returncode == 3
    assert "ulimit -f" in one_line(folder.stderr)
    value = json.loads(dataset.stdout)
    for name in ("writing", "small_files"):
        assert (value[name], "too large" in value["missing"][name]) == (None, True)
    assert not list(tmp_path.iterdir())
    assert not list(lmdb_shards.parent.glob(".prep*"))


@pytest.mark.torture
@needs_mounts
def test_what_a_file_system_does_not_let_be_measured_is_told(lmdb_shards: Path, tmp_path: Path) -> None:
    def mounted(line: str, path: Path) -> subprocess.CompletedProcess[str]:
        prefix = ["unshare", "-m", "sh", "-c", f'{line} && exec "$@"', "sh"]
        return prep("bench-disk", path, "--seconds", 0, "--json", prefix=prefix)

    full = mounted(f"mount -t tmpfs -o size=8m tmpfs {tmp_path}", tmp_path)
    assert full.returncode == 3
    assert "make room" in one_line(full.stderr)

    small = json.loads(mounted(f"mount -t tmpfs -o size=20m tmpfs {tmp_path}", tmp_path).stdout)
    assert small["bytes"] <= 5 << 20
    assert small["missing"]["cold"] == "tmpfs keeps its files in memory"
    assert small["images_per_second"]["cold"] is None
    assert all(reads["cold"] is None for reads in (small["stream"], *small["sequential"], *small["random"]))
    assert not list(tmp_path.iterdir())

    place = lmdb_shards.parent
    read_only = f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"
    dataset, folder = json.loads(mounted(read_only, lmdb_shards).stdout), mounted(read_only, place)
    assert dataset["stream"]["warm"]["median"] > 0
    assert {dataset["missing"][name] for name in ("writing", "small_files")} == {
        "no folder beside it is writable"
    }
    assert folder.returncode == 3
    assert "Read-only file system" in one_line(folder.stderr)


@pytest.mark.torture
@pytest.mark.skipif(not is_root() or not shutil.which("setpriv"), reason="needs to change its user")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

    for path in (secret, tmp_path):
        done = prep("bench-disk", path, "--seconds", 0, prefix=unprivileged)
        assert done.returncode == 3
        assert one_line(done.stderr) == f"prep: {path}: Permission denied\n"


@pytest.mark.torture
@pytest.mark.parametrize("during", ["reading", "small files"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, during: str) -> None:
    command = [sys.executable, "-m", "shardprep", "bench-disk", str(tmp_path), "--seconds", "5"]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
        try:
            while process.poll() is None:
                small_files = list(tmp_path.glob(".prep-bench-disk-*/*"))
                if small_files if during == "small files" else len(session_of(process.pid)) > 1:
                    break
            os.killpg(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()

    assert (process.returncode, out) == (130, "")
    assert "interrupted" in one_line(errors)
    until(lambda: not session_of(process.pid) and not list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("stream/cold/median", "fast"),
        ("stream/cold/low", float("nan")),
        ("stream", None),
        ("random", []),
        ("random/0/queue_depth", True),
        ("sequential", "much"),
        ("images_per_second/cold", 9000.0),
        ("record_bytes", 0),
        ("missing", {}),
        ("extra", 1),
        ("remarks", [1]),
        ("writing", []),
        ("small_files", ...),  # left out
    ],
)
def test_a_damaged_profile_is_refused(place: str, value: object, tmp_path: Path) -> None:
    whole = full_profile().to_json()
    *above, last = place.split("/")
    part: Any = whole
    for name in above:
        part = part[int(name) if name.isdigit() else name]
    part[last] = value
    kept = {name: part for name, part in whole.items() if part is not ...}
    (tmp_path / "disk.json").write_text(json.dumps(kept))

    with pytest.raises(DataError, match=r"disk\.json: is a damaged disk profile"):
        DiskProfile.load(tmp_path / "disk.json")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "other"}', "[" * 100_000, "\ud800", "\x00"]
)
def test_a_foreign_file_and_a_later_version_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "disk.json").write_text(text, errors="surrogatepass")

    with pytest.raises(DataError, match="is not a disk profile"):
        DiskProfile.load(tmp_path / "disk.json")
    with pytest.raises(UnknownVersion, match="profile version 2"):
        DiskProfile.from_json(full_profile().to_json() | {"version": 2})


def test_without_cold_rates_the_sentence_has_the_warm_one_only() -> None:
    no_cold = {"stream": Reads(None, rate(4e9)), "missing": Missing("tmpfs", None, None)}
    said = disk_sentence(replace(full_profile(), cold_method=None, **no_cold))

    assert "per record this disk delivers 40,000 images/s warm" in said
    assert "cold" not in said
