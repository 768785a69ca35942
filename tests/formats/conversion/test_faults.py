"""Faults at system calls: after a kill, a full disk or an error anywhere, the next run finishes the job."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats import convert
from support.datasets import is_root, prep, tree
from support.sampling import torture_except

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
