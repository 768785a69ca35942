"""Faults at system calls: after a kill, a full disk or an error anywhere, the next run finishes the job."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardprep.formats import convert
from support.datasets import is_root, prep, tree
from support.process_table import text_of
from support.sampling import torture_except

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(not STRACE, reason="strace is not installed")

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
        "sys.modules['shardprep.formats.conversion.prepare'].check_room = lambda *a, **kw: None\n"
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
