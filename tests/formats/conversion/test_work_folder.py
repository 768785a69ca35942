"""A run leaves and removes only its own files, in a folder of its own that goes with it."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import (
    BadImage,
    DataError,
    PlanMismatch,
    PlanOptions,
    UsageError,
    convert,
    repair,
    verify,
)
from shardprep.formats.conversion.plan import PlannedShard
from shardprep.formats.runtime import jobs
from shardprep.formats.runtime.jobs import ProgressCounters, ShardCounter
from shardprep.formats.runtime.work_folder import WorkFolder, make_run_folder
from shardprep.formats.shards.container import Extent
from support.datasets import converted, is_root, prep, tree
from support.sampling import torture_except


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years")
    return folder


def test_a_link_in_place_of_the_work_folder_is_refused_and_never_followed(
    archives: Path, tmp_path: Path, victim: Path
) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset)
    (dataset / ".prep").symlink_to(victim)

    assert [f.file for f in verify(dataset).findings] == [".prep"]
    with pytest.raises((DataError, UsageError)):
        converted(archives, dataset)
    sorted(dataset.glob("shard-*"))[0].unlink()
    with pytest.raises(UsageError):
        repair(dataset, archives, workers=0)
    assert (victim / "thesis.txt").read_text() == "three years"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    torture_except(
        ["counters", "lock", "plan.json", "index.npy", "shard-00000.lmdb.tmp"], "lock", "shard-00000.lmdb.tmp"
    ),
)
def test_links_inside_a_work_folder_are_never_written_through(
    archives: Path, tmp_path: Path, victim: Path, name: str
) -> None:
    work_folder = tmp_path / "out" / ".prep"
    work_folder.mkdir(parents=True)
    (work_folder / name).symlink_to(victim / "thesis.txt")

    prep("convert", archives, tmp_path / "out", "--split", "train", "--restart")

    assert (victim / "thesis.txt").read_text() == "three years"


def test_an_unreadable_plan_says_what_to_do(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".prep").mkdir(parents=True)
    (tmp_path / "out" / ".prep" / "plan.json").write_text("{")

    with pytest.raises(PlanMismatch, match="--restart"):
        converted(archives, tmp_path / "out")


class Holding(ThreadPoolExecutor):
    """An executor that fails the second job at once, and holds the first in the middle until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(2)
        self.jobs: list[Future[Any]] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        real = sys.modules["shardprep.formats.conversion.shard"]._write  # type: ignore[attr-defined]

        def write(job: Any, built: Path) -> Any:
            if job.shard.number == 0:
                written = real(job, built)
                self.has_begun.set()
                self.may_go_on.wait(30)
                return written
            self.has_begun.wait(30)
            raise BadImage("is none")

        monkeypatch.setattr("shardprep.formats.conversion.shard._write", write)

    def submit(self, *call: Any, **given: Any) -> Future[Any]:
        self.jobs.append(super().submit(*call, **given))
        return self.jobs[-1]


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    with Holding(monkeypatch) as executor:
        yield executor
        executor.may_go_on.set()


def test_a_job_that_goes_on_in_an_executor_after_its_run_has_failed_publishes_nothing(
    archives: Path, tmp_path: Path, holding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PlanOptions(shard_size=60_000)
    with pytest.raises(BadImage):
        convert(archives, tmp_path / "out", split="train", plan_options=options, executor=holding)
    monkeypatch.undo()
    converted(archives, tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}

    holding.may_go_on.set()

    assert isinstance(holding.jobs[0].result(30), FileNotFoundError)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before
    assert verify(tmp_path / "out").findings == []


def test_folders_of_dead_runs_are_removed_and_links_of_such_names_are_not_followed(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "out" / ".prep"
    for folder in (victim, place / "run-that-is-dead"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("three years")
    (place / "run-that-is-a-link").symlink_to(victim)
    (place / "run-that-is-a-file").write_text("")

    with WorkFolder(tmp_path / "out") as work_folder:
        assert {path.name for path in place.iterdir()} == {"lock", work_folder.run.name}

    assert {path.name for path in place.iterdir()} == {"lock"}
    assert (victim / "file").read_text() == "three years"


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch, archives: Path, tmp_path: Path) -> None:
    """Another run begins and finishes when a conversion into ``tmp_path / "out"`` is about to lock it."""
    module = sys.modules["shardprep.formats.conversion.prepare"]
    real = module.WorkFolder

    def work_folder(output: Path, *, shared: bool) -> WorkFolder:
        monkeypatch.undo()
        converted(archives, tmp_path / "out")
        return real(output, shared=shared)

    monkeypatch.setattr(module, "WorkFolder", work_folder)


@pytest.mark.usefixtures("overtaken")
def test_a_run_that_another_one_overtook_finds_it_complete(archives: Path, tmp_path: Path) -> None:
    options = PlanOptions(shard_size=60_000)

    (done,) = convert(archives, tmp_path / "out", split="train", plan_options=options, workers=0)

    assert done.already_complete
    assert not (tmp_path / "out" / ".prep").exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path)


def counters(path: Path, shards: int = 3) -> ProgressCounters:
    """Counters of shards of ten images with 70 bytes together."""
    extent = Extent(records=10, payload_bytes=70, key_bytes=1)
    planned = [PlannedShard(f"shard-{n}", n, 10 * n, 10 * n + 10, extent) for n in range(shards)]
    return ProgressCounters(path, planned)


def flags(counter: ShardCounter) -> int:
    found: int = fcntl.fcntl(counter._file.fileno(), fcntl.F_GETFL)
    return found


def test_a_worker_of_another_host_writes_synchronously_and_now_and_then_and_at_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counters(path)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    clock = [0.0]
    monkeypatch.setattr(jobs, "monotonic", lambda: clock[-1])
    counter = ShardCounter(path, 1)
    assert flags(counter) & os.O_DSYNC
    assert flags(counter) & os.O_ACCMODE == os.O_WRONLY

    shown = []
    for count, now in enumerate((0.2, 0.9, 1.1, 1.5, 2.2, 2.3), 1):
        clock.append(now)
        counter.set(count)
        shown.append(seen.done(1))
    assert shown == [0, 0, 3, 3, 5, 5]
    counter.close()
    assert seen.done(1) == 6


SMALL_DISKS = {"lmdb": "300k", "hdf5": "300k", "tar": "20k"}


def arguments(source: Path, output: Path, container: str) -> list[object]:
    options = ["--split", "val", "--shard-size", 150_000, "--workers", 0]
    if container == "tar":
        return ["index", source, output, *options]
    return ["convert", source, output, "--format", container, *options]


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
