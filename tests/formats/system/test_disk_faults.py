"""An error of the disk names the file and what is used up; a read that stops short is no end of a file."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats import OperationError, repair
from support.datasets import converted, is_root, prep, tree, unpack
from support.sampling import torture_except
from support.short_reads import cut_below

needs_mounts = pytest.mark.skipif(not is_root() or not shutil.which("unshare"), reason="needs leave to mount")
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
INODES = 14  # enough for the initial files, and not for all shards


@pytest.mark.torture
@needs_mounts
@pytest.mark.parametrize(
    ("container", "workers"), torture_except([("lmdb", 0), ("lmdb", 1), ("hdf5", 0)], ("hdf5", 0))
)
def test_a_disk_without_inodes_is_reported_and_a_run_with_more_finishes(
    archives: Path, tmp_path: Path, container: str, workers: int
) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    command = (
        f"{sys.executable} -m shardprep.cli convert {archives} {disk}/out --split val --format {container}"
    )
    script = f"""
        mount -t tmpfs -o size=16m,nr_inodes={INODES} tmpfs {disk}
        {command} --shard-size 60000 --workers {workers}; echo first $?
        mount -o remount,nr_inodes=1000 {disk}
        {command} --shard-size 60000 --workers 0 >/dev/null; echo second $?
        cp -r {disk}/out {kept}
    """

    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=120)

    assert done.stdout.split() == ["first", "3", "second", "0"], done.stderr
    assert "no free inodes" in done.stderr
    assert "full" not in done.stderr
    converted(archives, tmp_path / "whole", split="val", container=container)
    assert tree(kept) == tree(tmp_path / "whole")


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize(
    ("container", "calls", "when", "error", "told"),
    torture_except(
        [
            ("lmdb", "pwrite64,pwritev", "2+", "ENOMEM", "Cannot allocate memory"),
            ("lmdb", "pwrite64,pwritev", "2+", "ESTALE", "Stale file handle"),
            ("lmdb", "pwrite64,pwritev", "2+", "EDQUOT", "the disk quota is used up"),
            ("hdf5", "write", "3", "ESTALE", "Stale file handle"),
            ("hdf5", "fsync", "3", "EIO", "Input/output error"),
        ],
        ("lmdb", "pwrite64,pwritev", "2+", "ENOMEM", "Cannot allocate memory"),
        ("hdf5", "fsync", "3", "EIO", "Input/output error"),
    ),
)
def test_an_error_of_the_system_names_the_file_and_is_the_systems(
    archives: Path, tmp_path: Path, container: str, calls: str, when: str, error: str, told: str
) -> None:
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--format", container, "--workers", 0]

    done = prep(*words, "--quiet", prefix=injecting(calls, error, when))

    assert done.returncode == 3
    assert done.stderr.startswith(f"prep: {tmp_path / 'out'}")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def injecting(calls: str, error: str, when: str) -> list[str]:
    fault = f"{calls}:error={error}:when={when}"
    return ["strace", "-f", "-qq", "-o/dev/null", f"-etrace={calls}", f"-einject={fault}"]


@pytest.mark.parametrize("name", ["shard-00000.lmdb", "index.npy"])
def test_a_folder_in_a_files_place_is_named_and_left_alone(archives: Path, tmp_path: Path, name: str) -> None:
    converted(archives, tmp_path / "out")
    place = tmp_path / "out" / name
    place.unlink()
    place.mkdir()

    with pytest.raises(OperationError, match="is a folder where a file belongs") as caught:
        repair(tmp_path / "out", archives, workers=0)

    assert caught.value.path == str(place)
    assert place.is_dir()
    place.rmdir()
    assert repair(tmp_path / "out", archives, workers=0).findings == []


def folders(archives: Path, root: Path) -> Path:
    unpack(archives, root)
    shutil.copy(archives / "ILSVRC2012_devkit_t12.tar.gz", root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "container"), torture_except([("tars", "lmdb"), ("folders", "hdf5")], ("tars", "lmdb"))
)
def test_a_source_that_gives_ten_bytes_at_a_time_is_converted_to_the_same_bytes(
    archives: Path, tmp_path: Path, layout: str, container: str
) -> None:
    source = archives if layout == "tars" else folders(archives, tmp_path / "source")
    environment = cut_below(source, tmp_path / "short_reads.so")
    words = ["convert", source, tmp_path / "out", "--split", "val", "--format", container]

    done = prep(*words, "--shard-size", 60_000, "--workers", 0, "--quiet", env=environment)

    assert (done.returncode, done.stderr) == (0, "")
    converted(source, tmp_path / "whole", split="val", container=container)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("container", torture_except(["lmdb", "hdf5"], "lmdb"))
def test_an_output_that_gives_ten_bytes_at_a_time_is_the_same(
    archives: Path, tmp_path: Path, container: str
) -> None:
    environment = cut_below(tmp_path / "out", tmp_path / "short_reads.so")
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--format", container, "--workers", 0]

    done = prep(*words, "--shard-size", 60_000, "--quiet", env=environment)

    assert (done.returncode, done.stderr) == (0, "")
    converted(archives, tmp_path / "whole", split="val", container=container)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
