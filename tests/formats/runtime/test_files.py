"""Files of the disk: a final name never leads to anything unfinished, and an error names the file."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from unittest.mock import Mock

import pytest

import shardprep
from shardprep.formats import ShardprepError, open_dataset, repair
from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.files import open_for_publishing, publish_bytes, save_bytes
from support.datasets import converted, prep, tree, unpack
from support.sampling import needs_mounts, needs_strace, torture_except


@pytest.fixture
def final(tmp_path: Path) -> Path:
    return tmp_path / "final"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(final: Path, error: type[BaseException]) -> None:
    publish_bytes(final, b"old", final.parent)

    with suppress(error), open_for_publishing(final, final.parent) as file:
        file.write(b"new")
        raise error("in the middle")

    assert final.read_bytes() == b"old"
    assert list(final.parent.iterdir()) == [final]


def test_two_attempts_never_write_to_one_file_nor_through_a_link(
    final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, victim = final.parent, final.parent / "victim"
    victim.write_bytes(b"precious")
    with open_for_publishing(final, folder) as first, open_for_publishing(final, folder) as second:
        assert first.name != second.name
    monkeypatch.setattr("secrets.token_hex", lambda size: "same")
    (folder / "final.same.tmp").symlink_to(victim)

    with pytest.raises(FileExistsError):
        publish_bytes(final, b"data", folder)

    assert victim.read_bytes() == b"precious"
    assert not final.is_symlink()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_never_replaced(make: Callable[[Path], None], final: Path) -> None:
    make(final)
    before = final.lstat()

    with pytest.raises(OperationError, match="not a regular file"):
        save_bytes(final, b"one")

    assert final.lstat().st_mode == before.st_mode
    assert list(final.parent.iterdir()) == [final]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_ends_early_leaves_what_was_there(
    error: BaseException, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bytes(final, b"one")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))

    with pytest.raises(type(error)) as found:
        save_bytes(final, b"two")

    assert str(found.value) in ("", f"[Errno 28] No space left on device: '{final}'")
    assert final.read_bytes() == b"one"
    assert list(final.parent.iterdir()) == [final]


def test_a_folder_that_cannot_be_flushed_is_no_error(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=[None, OSError(22, "Invalid argument")]))
    save_bytes(final, b"one")
    assert final.read_bytes() == b"one"


@pytest.mark.slow
def test_every_error_survives_pickling_and_being_made_of_a_message_as_pytorch_does() -> None:
    lines = "Caught it in a worker.\nOriginal Traceback (most recent call last):\n  a line\nits\x1b last line"
    for module in walk_packages(shardprep.__path__, "shardprep."):
        if not re.search("tf_inputs|_data$|torchvision|albumentations|__main__", module.name):
            import_module(module.name)
    waiting = [ShardprepError]
    while waiting:
        waiting += (kind := waiting.pop()).__subclasses__()
        error = kind(lines)
        error.path, error.key = "a path", "a key"
        again = pickle.loads(pickle.dumps(error))  # noqa: S301

        assert (type(again), vars(again)) == (kind, vars(error))
        assert str(again).splitlines() == lines.replace("\x1b", r"\x1b").splitlines()


@pytest.mark.torture
@needs_mounts
@pytest.mark.parametrize(
    ("container", "workers"), torture_except([("lmdb", 0), ("lmdb", 1), ("hdf5", 0)], ("hdf5", 0))
)
def test_a_disk_without_inodes_is_reported_and_a_run_with_more_finishes(
    archives: Path, tmp_path: Path, container: str, workers: int
) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    command = f"{sys.executable} -m shardprep convert {archives} {disk}/out --split val --format {container}"
    script = f"""  # inodes for the initial files, and not for all shards
        mkdir {disk} && mount -t tmpfs -o size=16m,nr_inodes=14 tmpfs {disk}
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
            ("lmdb", "flock", "1", "ENOSYS", "Lustre: -o flock"),
            ("in place", "symlink,symlinkat", "1", "ENOSYS", "the file system there cannot do this"),
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
    command = ["index"] if container == "in place" else ["convert", "--format", container]
    words = [*command, archives, tmp_path / "out", "--split", "val", "--workers", 0]

    fault = (f"-etrace={calls}", f"-einject={calls}:error={error}:when={when}")
    done = prep(*words, "--quiet", prefix=["strace", "-f", "-qq", "-o/dev/null", *fault])

    assert done.returncode == 3
    assert done.stderr.startswith(f"prep: {tmp_path / 'out'}")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize(("layout", "container"), [("tars", "lmdb"), ("folders", "hdf5")])
def test_reads_of_ten_bytes_at_a_time_give_the_same_bytes(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, container: str
) -> None:
    source = unpack(archives, tmp_path / "source") if layout == "folders" else archives
    converted(source, tmp_path / "whole", split="val", container=container)
    with open_dataset(tmp_path / "whole") as whole:
        records = list(whole)
    pread, preadv, read = os.pread, os.preadv, os.read
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 10), at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [memoryview(buffers[0])[:10]], at))
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 10)))

    converted(source, tmp_path / "out", split="val", container=container)

    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    with open_dataset(tmp_path / "out") as out:
        assert list(out) == records
