"""Faults at system calls: after a kill, a full disk or an error anywhere, the next run finishes the job."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shardprep.formats import convert, verify
from support.datasets import converted, is_root, prep, tree
from support.process_table import text_of
from support.sampling import sampled, torture_except

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(not STRACE, reason="strace is not installed")

WRITES = ["write", "pwrite64", "pwritev", "writev"]
FLUSHES = ["fsync", "fdatasync"]
CHANGES = [*WRITES, *FLUSHES, "rename", "symlink", "unlink", "mkdir", "chmod", "ftruncate", "rmdir"]
SMALL_DISKS = {"lmdb": "300k", "hdf5": "300k", "tar": "20k"}
SIZES = {"lmdb": 150_000, "hdf5": 150_000, "tar": 150_000}


def arguments(source: Path, output: Path, container: str) -> list[object]:
    if container == "tar":
        return ["index", source, output, "--split", "val", "--shard-size", SIZES[container], "--workers", 0]
    return [
        *("convert", source, output, "--split", "val", "--format", container),
        *("--shard-size", SIZES[container], "--workers", 0),
    ]


@pytest.fixture(scope="module", params=torture_except(["lmdb", "hdf5", "tar"], "lmdb"))
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(archives: Path, tmp_path_factory: pytest.TempPathFactory, container: str) -> Path:
    """The output of an unbroken run."""
    output = tmp_path_factory.mktemp("whole") / "out"
    prep(*arguments(archives, output, container), check=True)
    return output


class Trace(NamedTuple):
    """The system calls of an unbroken run, with the paths of their descriptors, and what it made."""

    calls: list[str]
    output: Path


@pytest.fixture(scope="module")
def trace(archives: Path, tmp_path_factory: pytest.TempPathFactory, container: str) -> Trace:
    output = tmp_path_factory.mktemp("traced") / "out"
    log = output.parent / "log"
    names = ",".join(CHANGES)
    prep(
        *arguments(archives, output, container),
        prefix=[str(STRACE), "-f", "--seccomp-bpf", "-y", f"-etrace={names}", f"-o{log}"],
        check=True,
    )
    return Trace(log.read_text(errors="replace").splitlines(), output)


def points(trace: Trace, names: list[str]) -> list[tuple[str, int]]:
    """Every call of those names that changes the output in an unbroken run, as (name, number)."""
    calls = [re.match(r"(\d+) +(\w+)\((.*)", line) for line in trace.calls]
    own = [call for call in calls if call and str(trace.output) in call[3]]
    counts: Counter[str] = Counter()
    found = []
    for call in calls:
        if call and call[1] == own[0][1]:
            counts[call[2]] += 1
            if call in own and call[2] in names:
                found.append((call[2], counts[call[2]]))
    assert counts["rename"] >= 8
    return found


def assert_finishes(archives: Path, output: Path, whole: Path, container: str) -> None:
    if (output / "manifest.json").exists():
        assert verify(output).findings == []
    order = "archive" if container == "tar" else "shuffled"
    converted(archives, output, split="val", container=container, order=order, shard_size=SIZES[container])
    assert tree(output) == tree(whole)


def inject(archives: Path, output: Path, container: str, fault: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(output, ignore_errors=True)
    return prep(
        *arguments(archives, output, container),
        prefix=[
            *(str(STRACE), "-f", "-qq", "-o/dev/null"),
            *([] if "signal=" in fault else ["--seccomp-bpf"]),  # faster, but sends no signals
            *("-etrace=" + fault.partition(":")[0], "-einject=" + fault),
        ],
    )


def one_of_each_kind(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The middle one of the calls of each name, without those that only prepare or tidy up."""
    names = dict.fromkeys(name for name, _ in points if name not in ("mkdir", "rmdir", "chmod"))
    by_name = ([point for point in points if point[0] == name] for name in names)
    return [some[len(some) // 2] for some in by_name]


def many(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first and the last call of each name, and some of the others; all of them take very long."""
    by_name = [[point for point in points if point[0] == name] for name in dict.fromkeys(dict(points))]
    ends = {point for some in by_name for point in (some[0], some[-1])}
    return [point for point in points if point in ends | set(sampled(points, 20))]


samples = pytest.mark.parametrize(
    "sample",
    [one_of_each_kind, pytest.param(many, marks=[pytest.mark.torture, pytest.mark.timeout(1200)])],
    ids=["one of each kind", "many"],
)
Sample = Callable[[list[tuple[str, int]]], list[tuple[str, int]]]


@pytest.mark.slow
@needs_strace
@samples
def test_killed_at_any_system_call_it_finishes_byte_identical(
    archives: Path, whole: Path, container: str, trace: Trace, tmp_path: Path, sample: Sample
) -> None:
    for name, number in sample(points(trace, CHANGES)):
        done = inject(archives, tmp_path / "out", container, f"{name}:signal=SIGKILL:when={number}")
        assert done.returncode != 0
        assert_finishes(archives, tmp_path / "out", whole, container)


@pytest.mark.slow
@needs_strace
@samples
def test_an_error_at_any_system_call_is_reported_and_the_next_run_finishes(
    archives: Path, whole: Path, container: str, trace: Trace, tmp_path: Path, sample: Sample
) -> None:
    for name, number in sample(points(trace, [*WRITES, *FLUSHES, "rename", "ftruncate"])):
        error = "EIO" if name in FLUSHES or number % 2 else "ENOSPC"
        done = inject(archives, tmp_path / "out", container, f"{name}:error={error}:when={number}")
        assert done.returncode == 3, (name, number, error, done.stderr)
        assert "Traceback" not in done.stderr
        assert_finishes(archives, tmp_path / "out", whole, container)


@needs_strace
def test_nothing_gets_its_name_before_its_bytes_are_on_the_disk(trace: Trace) -> None:
    below = str(trace.output.parent)

    assert list(order_faults(trace.calls, below)) == []
    without = [call for call in trace.calls if "fsync(" not in call]
    assert list(order_faults(without, below))  # the lint sees what it is there to see


def order_faults(calls: list[str], below: str) -> Iterator[str]:
    """Renames of unflushed files, and commits or manifests before the folder of their files is flushed."""
    dirty: set[str] = set()
    unflushed_folders: set[str] = set()
    for call in calls:
        if match := re.match(r"\d+ +(\w+)\(\d+<([^>]*)>", call):
            name, path = match.groups()
            if name in WRITES and path.startswith(below):
                dirty.add(path)
            elif name in FLUSHES:
                dirty.discard(path)
                unflushed_folders.discard(path)
        elif match := re.match(r'\d+ +rename\("([^"]*)", "([^"]*)"', call):
            built, final = match.groups()
            if built in dirty:
                yield f"{final} was renamed before it was flushed"
            vouches = final.endswith((".commit", "manifest.json"))
            if vouches and unflushed_folders:
                yield f"{final} was published before {unflushed_folders} were flushed"
            unflushed_folders.add(str(Path(final).parent))


@pytest.mark.slow
@needs_strace
def test_verify_distinguishes_what_it_could_not_read_from_damage(whole: Path, tmp_path: Path) -> None:
    shard = sorted(whole.glob("shard-*"))[1]
    done = prep(
        *("verify", whole),
        prefix=[
            str(STRACE),
            f"-P{shard}",
            "-f",
            "-qq",
            "-o/dev/null",
            "-etrace=pread64,preadv,preadv2",
            "-einject=pread64,preadv,preadv2:error=EIO:when=1+",
        ],
    )

    assert done.returncode == 3
    assert f"unchecked: {shard.name}" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not is_root() or not shutil.which("unshare"), reason="needs leave to mount")
def test_a_full_disk_is_reported_and_a_run_with_more_space_finishes(
    archives: Path, whole: Path, container: str, tmp_path: Path
) -> None:
    disk, keep = tmp_path / "disk", tmp_path / "keep"
    disk.mkdir()
    line = " ".join(map(str, arguments(archives, disk / "out", container)))
    unchecked = tmp_path / "unchecked.py"
    unchecked.write_text(
        "import sys\nimport shardprep.formats.conversion.finish\nfrom shardprep.cli.app import run\n"
        "sys.modules['shardprep.formats.conversion.convert'].check_space = lambda *a: None\n"
        f"sys.exit(run({line!r}.split()))\n"
    )
    script = f"""
        mount -t tmpfs -o size={SMALL_DISKS[container]} tmpfs {disk}
        {sys.executable} {unchecked}; echo first $?
        mount -o remount,size=16m {disk}
        {sys.executable} -m shardprep.cli {line} >/dev/null; echo second $?
        cp -r {disk}/out {keep}
    """

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.split() == ["first", "3", "second", "0"], done.stderr
    assert "Traceback" not in done.stderr
    assert "full" in done.stderr
    assert tree(keep) == tree(whole)


def command_of(archives: Path, output: Path) -> list[str]:
    """A conversion into as many shards as there are images, so that there is something to interrupt."""
    prep = [sys.executable, "-m", "shardprep.cli"]
    return [*prep, "convert", str(archives), str(output), "--split", "train", "--shard-size", "1"]


def run_and_kill(archives: Path, output: Path, after: float) -> bool:
    """Kill the whole process group of a run with two workers; return whether it was still running."""
    command = [
        sys.executable,
        "-m",
        "shardprep.cli",
        "convert",
        str(archives),
        str(output),
        "--split",
        "train",
    ]
    process = subprocess.Popen([*command, "--shard-size", "1", "--workers", "2"], start_new_session=True)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


@pytest.mark.torture
@pytest.mark.parametrize("seed", torture_except(range(3), 1))
def test_killed_with_its_workers_at_any_time_it_finishes_byte_identical(
    archives: Path, tmp_path: Path, seed: int
) -> None:
    converted(archives, tmp_path / "whole", shard_size=1)
    after = 0.5 + 0.11 * seed

    while run_and_kill(archives, tmp_path / "out", after):
        after *= 1.6

    assert verify(tmp_path / "out").findings == []
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def children_of(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in text_of(task).split()]


def is_worker(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def running(archives: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion with two workers that has begun to build shards."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*command_of(archives, out), "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(out.glob("shard-*")) and process.poll() is None:
        time.sleep(0.005)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_nothing_is_lost(
    running: subprocess.Popen[str], archives: Path, tmp_path: Path
) -> None:
    workers = [pid for pid in children_of(running.pid) if is_worker(pid)]
    for pid in workers[:1]:
        os.kill(pid, signal.SIGKILL)

    _, errors = running.communicate(timeout=120)

    assert workers
    assert running.returncode == 0, errors
    converted(archives, tmp_path / "whole", shard_size=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_workers_end_when_their_parent_is_killed(running: subprocess.Popen[str]) -> None:
    workers = children_of(running.pid)

    running.kill()
    running.wait()

    deadline = time.monotonic() + 10  # it takes milliseconds, longer on a loaded machine
    while any(Path(f"/proc/{pid}").exists() and is_worker(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_an_image_that_kills_its_worker_is_named(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardprep.formats import PlanOptions, WorkerDied
    from support.workers import PoisonedSource

    source = PoisonedSource(archives)
    monkeypatch.setattr(
        sys.modules["shardprep.formats.conversion.prepare"], "recognise", lambda *a, **k: source
    )

    with pytest.raises(WorkerDied) as caught:
        convert(
            archives, tmp_path / "out", split="train", plan_options=PlanOptions(shard_size=90_000), workers=2
        )

    assert caught.value.key == source.poison
