"""``prep bench-disk`` on real files: consistent figures, plain messages for missing ones, nothing left."""

from __future__ import annotations

import json
import mmap
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import OperationError, UsageError, WorkerDied
from shardprep.formats.runtime.files import filesystem_type
from shardprep.loaders.measuring.disk import Clock, ColdAndWarm, DiskProfile, measure_disk, run
from shardprep.loaders.measuring.disk_files import (
    DIRECT,
    FADVISE,
    ColdWay,
    Cursor,
    Forward,
    OpenFiles,
    ReadPlan,
    Scattered,
    cold_way,
    drop,
    evict,
    read,
    resident_part,
    resident_share,
    temporary_folder,
)
from support.datasets import is_root, prep, prep_here, tree
from support.disk_profiles import documented_paths, paths_of
from support.process_table import children, text_of
from support.repository import ROOT
from support.sampling import torture_except

FOREVER = 1e6
SIZES = (1_000_000, 10_000, 333_333)
needs_mounts = pytest.mark.skipif(not is_root() or not shutil.which("unshare"), reason="needs to mount")
needs_fio = pytest.mark.skipif(not shutil.which("fio"), reason="needs fio")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def files(tmp_path: Path, stack: ExitStack) -> OpenFiles:
    """Three files of odd sizes, of noise, flushed."""
    for number, size in enumerate(SIZES):
        with (tmp_path / f"{number}.bin").open("wb") as file:
            file.write(np.random.default_rng(number).bytes(size))
            file.flush()
            os.fsync(file.fileno())
    return OpenFiles.of([tmp_path / f"{number}.bin" for number in range(len(SIZES))], stack)


def needs_dropping(files: OpenFiles, folder: Path) -> None:
    if cold_way(files, filesystem_type(folder)).method != FADVISE:
        pytest.skip("the page cache of this file system cannot be emptied")


def test_dropped_pages_are_out_of_memory_and_read_ones_are_back(files: OpenFiles, tmp_path: Path) -> None:
    needs_dropping(files, tmp_path)
    plan = Forward(SIZES, 65536, Cursor()).next()

    assert drop(files.descriptors, plan.pieces, plan.block) == 0
    done = read(files.descriptors, plan, seconds=FOREVER)

    assert done.size == sum(SIZES)
    assert resident_part(files.descriptors, plan.pieces, plan.block) == 1
    evict(tmp_path / "0.bin")
    assert (resident_share(tmp_path / "0.bin"), resident_share(tmp_path / "1.bin")) == (0, 1)


@pytest.mark.slow
def test_mapped_pages_are_not_called_cold(files: OpenFiles, tmp_path: Path) -> None:
    needs_dropping(files, tmp_path)
    rates = ColdAndWarm(files, ColdWay(FADVISE), Forward(SIZES, 65536, Cursor()))
    with mmap.mmap(files.descriptors[0], 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) > 0
        rates.round(1)
        way = cold_way(files, filesystem_type(tmp_path))
    assert rates.reads.cold is None
    assert rates.reads.warm is not None
    assert way.method in (DIRECT, None)
    assert way.reason is not None
    assert "stayed in memory" in way.reason

    rates.round(1)
    assert rates.reads.cold is not None


def test_o_direct_takes_the_place_of_dropping(files: OpenFiles) -> None:
    if not files.open_direct():
        pytest.skip("no O_DIRECT here")
    for plans in (Forward(SIZES, 65536, Cursor()), Scattered(SIZES, 5000, depth=3)):
        rates = ColdAndWarm(files, ColdWay(DIRECT), plans)
        rates.round(1)
        assert rates.reads.cold is not None
        assert rates.reads.cold.method.endswith("O_DIRECT")
        assert rates.reads.warm is not None


@pytest.mark.parametrize("block", [4096, 65536, 4 << 20])
def test_forward_passes_read_every_byte_once_and_go_on_where_they_ended(files: OpenFiles, block: int) -> None:
    plans = Forward(SIZES, block, Cursor())

    plan = plans.next()
    plans.passed(sum(SIZES) // 2)

    assert len(set(plan.pieces)) == len(plan.pieces) == sum(-(-size // block) for size in SIZES)
    assert read(files.descriptors, plan, seconds=FOREVER).size == sum(SIZES)
    assert sorted(plans.next().pieces) == plan.pieces
    assert plans.next().pieces != plan.pieces or len(plan.pieces) == len(SIZES)


@pytest.mark.parametrize("depth", [1, 2, 16])
def test_random_passes_read_every_block_once_by_any_number_of_processes(files: OpenFiles, depth: int) -> None:
    plan = Scattered(SIZES, 5000, depth=depth).next()

    done = read(files.descriptors, plan, seconds=FOREVER)

    whole = sum(size // 8192 for size in SIZES)
    assert sorted(done.pieces) == sorted(plan.pieces)
    assert len(set(done.pieces)) == whole
    assert done.size == whole * 8192
    assert done.seconds > 0


@pytest.mark.parametrize("depth", [1, 4])
def test_without_time_each_reads_one_piece(files: OpenFiles, depth: int) -> None:
    plan = Scattered(SIZES, 4096, depth=depth).next()

    assert len(read(files.descriptors, plan, seconds=0).pieces) == depth


@pytest.mark.parametrize("depth", [1, 4])
def test_what_cannot_be_read_is_the_systems_error(tmp_path: Path, stack: ExitStack, depth: int) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    stack.callback(os.close, folder)

    with pytest.raises(IsADirectoryError):
        read([folder], ReadPlan([(0, 0)] * 8, 4096, depth=depth), seconds=FOREVER)


def test_a_reading_process_that_is_killed_is_told(files: OpenFiles) -> None:
    before, plan = children(), ReadPlan([(0, 0)] * 100_000, 65536, depth=2)

    def kill() -> None:
        while not (found := children() - before):
            time.sleep(0.001)
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDied, match="ended early"):
        read(files.descriptors, plan, seconds=60)
    killer.join()


def test_one_of_the_reading_processes_that_is_killed_before_it_is_ready_is_told(files: OpenFiles) -> None:
    before, plan = children(), ReadPlan([(0, 0)] * 8, 64 << 20, depth=4)

    def kill() -> None:
        while not (reading := children_of(children() - before)):
            time.sleep(0.001)
        os.kill(reading[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDied, match="ended early"):
        read(files.descriptors, plan, seconds=0.1)
    killer.join()


def children_of(processes: set[int]) -> list[int]:
    """The pids of other processes, the oldest first."""
    lists = [text_of(Path(f"/proc/{pid}/task/{pid}/children")) for pid in processes]
    return [int(pid) for each in lists for pid in each.split()]


class Counted:
    """A step that takes no time and counts its rounds."""

    title = "counting"
    weight = 1

    def __init__(self) -> None:
        self.slots: list[float] = []

    def round(self, seconds: float) -> None:
        self.slots.append(seconds)


def test_every_step_has_a_turn_without_time_and_more_with_it() -> None:
    hurried, unhurried = [Counted(), Counted()], [Counted(), Counted()]
    told: list[tuple[str, float]] = []

    run(hurried, Clock(0), lambda title, share: told.append((title, share)))
    run(unhurried, Clock(60), lambda title, share: None)

    assert [step.slots for step in hurried] == [[0.0], [0.0]]
    assert told == [("counting", 1.0)] * 2
    assert all(len(step.slots) > 3 for step in unhurried)
    assert 0 < sum(unhurried[0].slots[:3]) * 2 <= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", torture_except(["dataset", "file", "folder"], "dataset"))
def test_anything_can_be_measured_in_no_time(kind: str, lmdb_shards: Path, tmp_path: Path) -> None:
    path = {"dataset": lmdb_shards, "file": lmdb_shards / "shard-00000.lmdb", "folder": tmp_path}[kind]
    place = path if kind == "folder" else lmdb_shards.parent
    before = tree(place)

    profile = measure_disk(path, seconds=0)

    assert profile.kind == kind
    assert profile.stream.warm is not None
    assert [reads.block_bytes for reads in profile.sequential] == [1 << 16, 1 << 18, 1 << 20, 4 << 20]
    assert [reads.queue_depth for reads in profile.random] == [1, 2, 4, 8, 16]
    assert all(r.warm and r.warm.repetitions >= 1 for r in (*profile.sequential, *profile.random))
    assert (profile.cold_method is None) == (profile.missing.cold is not None)
    assert profile.small_files is not None
    assert profile.small_files.count >= 16
    assert profile.writing is not None
    assert tree(place) == before
    assert not [path for path in place.iterdir() if path.name.startswith(".prep")]


@pytest.mark.torture
def test_a_datasets_own_mean_is_its_record_size(lmdb_shards: Path) -> None:
    manifest = json.loads((lmdb_shards / "manifest.json").read_text())
    mean = manifest["dataset"]["image_bytes"] / manifest["dataset"]["records"]

    profile = measure_disk(lmdb_shards, seconds=0)
    other = measure_disk(lmdb_shards, seconds=0, record_bytes=1000)

    assert profile.record_bytes == round(mean)
    assert profile.files == len(manifest["shards"]) > 1
    assert profile.bytes == sum(shard["size"] for shard in manifest["shards"])
    assert (other.record_bytes, other.random[0].block_bytes) == (1000, 4096)
    assert profile.random[0].block_bytes == -(-profile.record_bytes // 4096) * 4096


@pytest.mark.torture
def test_a_folder_in_memory_has_no_cold_figures_and_says_why() -> None:
    shared = Path("/dev/shm")
    if filesystem_type(shared) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    before = set(shared.iterdir())

    text = prep("bench-disk", shared, "--seconds", 0.1, check=True).stdout
    profile = measure_disk(shared, seconds=0)

    assert "could not be measured: tmpfs keeps its files in memory" in text
    assert "images/s warm (cold could not be measured)" in text
    assert profile.missing.cold == "tmpfs keeps its files in memory"
    assert profile.images_per_second["cold"] is None
    assert all(reads.cold is None for reads in (profile.stream, *profile.sequential, *profile.random))
    assert set(shared.iterdir()) == before


@pytest.mark.torture
def test_the_command_tells_people_and_machines_the_same(lmdb_shards: Path, tmp_path: Path) -> None:
    words = ["bench-disk", lmdb_shards, "--seconds", "0.2"]

    text = prep(*words, check=True)
    asked = prep(
        *words, "--json", "--plot", tmp_path / "disk.png", "--save", tmp_path / "disk.json", check=True
    )

    value = json.loads(asked.stdout)
    assert value == json.loads((tmp_path / "disk.json").read_text())
    assert DiskProfile.load(tmp_path / "disk.json").to_json() == value
    assert (text.stderr, asked.stderr) == ("", "")
    assert "At this dataset's mean record size" in text.stdout.splitlines()[-1]
    assert "sequential, 64 KiB" in text.stdout
    image = cv2.imread(str(tmp_path / "disk.png"))
    assert image is not None
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk.json", "disk.png"]


@pytest.mark.slow
def test_printed_keys_are_the_documented_ones(lmdb_shards: Path) -> None:
    value = json.loads(prep("bench-disk", lmdb_shards, "--seconds", 0, "--json", check=True).stdout)

    printed, documented = set(paths_of(value)), documented_paths()
    absent = {path for path in printed - documented if any(d.startswith(f"{path}.") for d in documented)}

    assert printed - documented == absent  # null, where the file system has no cold figures
    assert {d for d in documented - printed if not d.startswith(tuple(f"{a}." for a in absent))} == set()


@pytest.mark.torture
def test_a_terminal_is_told_what_is_being_measured(lmdb_shards: Path) -> None:
    parent_end, child_end = pty.openpty()
    termios.tcsetwinsize(child_end, (24, 100))
    command = [sys.executable, "-m", "shardprep.cli", "bench-disk", str(lmdb_shards), "--seconds", "0.3"]
    with subprocess.Popen(command, stderr=child_end, stdout=subprocess.DEVNULL) as process:
        os.close(child_end)
        drawn = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(parent_end, 4096):
                drawn += part
    os.close(parent_end)

    assert process.returncode == 0
    assert b"random, 16 at once" in drawn


def one_line(stderr: str) -> str:
    assert stderr.startswith("prep: ")
    assert len(stderr.splitlines()) == 1
    return stderr


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("missing", 2, "does not exist"),
        ("empty", 2, "is empty"),
        ("fifo", 2, "neither a file nor a folder"),
        ("damaged", 1, "not JSON"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, name: str, code: int, says: str) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    before = sorted(tmp_path.iterdir())

    done = prep_here("bench-disk", tmp_path / name, "--seconds", 0)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in one_line(done.stderr)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--plot", "disk.jpg"], 2),
        (["--plot", "/nowhere/disk.png"], 3),
        (["--save", "/nowhere/disk.json"], 3),
        (["--seconds", "-1"], 2),
        (["--record-bytes", "0"], 2),
    ],
    ids=str,
)
def test_bad_options_are_told_before_anything_is_measured(
    tmp_path: Path, words: list[str], code: int
) -> None:
    done = prep_here("bench-disk", tmp_path, *words)

    assert done.returncode == code
    one_line(done.stderr)
    assert not list(tmp_path.iterdir())


def test_senseless_arguments_are_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        measure_disk(tmp_path, seconds=-1)
    with pytest.raises(UsageError):
        measure_disk(tmp_path, record_bytes=0)
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "missing")


@pytest.mark.torture
def test_a_file_size_limit_stops_a_folder_and_not_a_dataset(lmdb_shards: Path, tmp_path: Path) -> None:
    limit = ["prlimit", "--fsize=10000"]

    folder = prep("bench-disk", tmp_path, "--seconds", 0, prefix=limit)
    dataset = prep("bench-disk", lmdb_shards, "--seconds", 0, "--json", prefix=limit, check=True)

    assert folder.returncode == 3
    assert "ulimit -f" in one_line(folder.stderr)
    value = json.loads(dataset.stdout)
    assert value["writing"] is value["small_files"] is None
    assert "too large" in value["missing"]["writing"]
    assert "too large" in value["missing"]["small_files"]
    assert not list(tmp_path.iterdir())
    assert not list(lmdb_shards.parent.glob(".prep*"))


def mounted(line: str, path: Path) -> subprocess.CompletedProcess[str]:
    """``prep bench-disk --json`` in a mount namespace of its own."""
    words = [sys.executable, "-m", "shardprep.cli", "bench-disk", str(path), "--seconds", "0", "--json"]
    command = ["unshare", "-m", "sh", "-c", f'{line} && exec "$@"', "sh", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.torture
@needs_mounts
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    done = mounted(f"mount -t tmpfs -o size=8m tmpfs {tmp_path}", tmp_path)

    assert done.returncode == 3
    assert "make room" in one_line(done.stderr)


@pytest.mark.torture
@needs_mounts
def test_a_disk_with_little_room_is_measured_with_what_fits(tmp_path: Path) -> None:
    done = mounted(f"mount -t tmpfs -o size=20m tmpfs {tmp_path}", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes"] <= 5 << 20


@pytest.mark.torture
@needs_mounts
def test_what_may_not_be_written_is_only_read(lmdb_shards: Path) -> None:
    place = lmdb_shards.parent
    read_only = f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"

    dataset = mounted(read_only, lmdb_shards)
    folder = mounted(read_only, place)

    value = json.loads(dataset.stdout)
    assert value["stream"]["warm"]["median"] > 0
    assert value["missing"]["writing"] == value["missing"]["small_files"] == "no folder beside it is writable"
    assert folder.returncode == 3
    assert "Read-only file system" in one_line(folder.stderr)


@pytest.mark.torture
@pytest.mark.skipif(not is_root() or not shutil.which("setpriv"), reason="needs to change its user")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

    done = prep("bench-disk", secret, "--seconds", 0, prefix=unprivileged)
    folder = prep("bench-disk", tmp_path, "--seconds", 0, prefix=unprivileged)

    assert (done.returncode, folder.returncode) == (3, 3)
    assert one_line(done.stderr) == f"prep: {secret}: Permission denied\n"
    assert one_line(folder.stderr) == f"prep: {tmp_path}: Permission denied\n"


@pytest.mark.torture
@pytest.mark.parametrize(
    ("during", "times"),
    [
        ("reading", 1),
        pytest.param("small files", 3, marks=pytest.mark.torture),
        pytest.param("reading", 3, marks=pytest.mark.torture),
        pytest.param("small files", 1, marks=pytest.mark.torture),
    ],
)
def test_an_interruption_leaves_nothing(tmp_path: Path, during: str, times: int) -> None:
    (tmp_path / "disk").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardprep.cli", "bench-disk", str(tmp_path / "disk"), "--seconds", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    with killed_at_last(process):
        _check_interruption(process, tmp_path, during, times)


@contextmanager
def killed_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process in any case: one left over would fail later tests."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def _check_interruption(process: subprocess.Popen[str], tmp_path: Path, during: str, times: int) -> None:
    while process.poll() is None:
        small_files = list((tmp_path / "disk").glob(".prep-bench-disk-*/*"))
        if small_files if during == "small files" else readers(tmp_path):
            break
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=60)

    assert (process.returncode, out) == (130, "")
    if errors or times == 1:  # a second signal ends it at once
        assert "interrupted" in one_line(errors)
    assert not list((tmp_path / "disk").iterdir())
    deadline = time.monotonic() + 30
    while readers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not readers(tmp_path)


def readers(folder: Path) -> list[str]:
    """The reading processes that were started in this folder."""
    found = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    reading = [entry for entry in found if "reader_process" in text_of(entry / "cmdline")]
    return [entry.name for entry in reading if folder_of(entry) == folder.resolve()]


def folder_of(process: Path) -> Path | None:
    """A process's working folder; None where it has ended."""
    try:
        return (process / "cwd").resolve(strict=True)
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_temporary_folder_is_removed_before_signals_take_effect(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), temporary_folder(tmp_path):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(OperationError), temporary_folder(tmp_path):
        raise OperationError("something else")

    assert not list(tmp_path.iterdir())


@needs_fio
@pytest.mark.torture
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize(
    ("at_random", "block", "depth"), [(False, 1 << 20, 1), (True, 110_000, 1), (True, 110_000, 16)]
)
def test_rates_are_those_of_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_random: bool, block: int, depth: int, cold: bool
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from disk_against_fio import Case, compare, of_best

    path, data = tmp_path / "large", np.random.default_rng().bytes(1 << 24)
    path.write_bytes(data * 16)
    found: list[tuple[float, float]] = []

    for _ in range(4):  # other work on the machine only slows a round down
        found += compare(path, Case(at_random, block, depth, cold), 3)
        if 0.65 < of_best(found) < 1.35:
            break

    assert 0.65 < of_best(found) < 1.35, found
