"""A copy in a cache that the disk did not keep is fetched again; damage that was published is an error."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import open_dataset
from shardprep.formats.runtime.files import hash_file
from shardprep.loaders import Flow
from support.column_datasets import write_columns
from support.datasets import flip, prep_here, tree


def copies_of(cache: Path, names: str = "") -> list[Path]:
    """The files of the one dataset in a cache that begin with these names."""
    (folder,) = (cache / "datasets").iterdir()
    return [
        path.resolve()
        for path in sorted(folder.iterdir())
        if path.name.startswith(names) and path.is_symlink()
    ]


def by_dataset(url: str, cache: Path) -> list[Any]:
    with open_dataset(url, cache=cache) as found:
        names = found.columns.names
        return [(record, [record.columns[name] for name in names]) for record in found]  # type: ignore[attr-defined]


def by_flow(url: str, cache: Path) -> list[Any]:
    return list(Flow.from_dataset(url, cache=cache, with_keys=True))


@pytest.mark.parametrize("read", [by_dataset, by_flow])
@pytest.mark.parametrize("name", ["shard", "index", "column-age", "column-caption-", "column-caption.npy"])
def test_a_dataset_and_a_flow_read_what_was_published(
    tmp_path: Path, name: str, read: Callable[[str, Path], list[Any]]
) -> None:
    write_columns(tmp_path / "columns")
    url, cache = (tmp_path / "columns").as_uri(), tmp_path / "c"
    expected = repr(read(url, cache))
    for copy in copies_of(cache, name):
        for position in range(150, copy.stat().st_size, 11):
            flip(copy, position)

    assert repr(read(url, cache)) == expected
    assert all(hash_file(copy) == f"sha256:{copy.name}" for copy in copies_of(cache, name))


def test_a_bad_sector_below_a_copy_is_a_copy_that_the_disk_did_not_keep(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_dataset(lmdb_shards.as_uri(), cache=tmp_path / "c") as found:
        first = found[0]
        (inode,) = {path.stat().st_ino for path in copies_of(tmp_path / "c", "shard") if path.exists()}
        really = os.pread, os.preadv

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def read(descriptor: int, *where: Any) -> Any:
                if os.fstat(descriptor).st_ino == inode:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return call(descriptor, *where)

            return read

        monkeypatch.setattr(os, "pread", failing(really[0]))
        monkeypatch.setattr(os, "preadv", failing(really[1]))
        assert found[0] == first


def test_the_folder_of_a_cache_is_not_repaired_or_written_to(lmdb_shards: Path, tmp_path: Path) -> None:
    with open_dataset(lmdb_shards.as_uri(), cache=tmp_path / "c") as found:
        assert found[0]
        folder = found.path
    flip(copies_of(tmp_path / "c", "shard")[0], 5000)
    before = tree(tmp_path / "c")

    for words in (
        ("repair", folder, "--source", lmdb_shards.as_uri()),
        ("repair", folder, "--source", lmdb_shards.parent / "archives"),
        ("fetch", lmdb_shards.as_uri(), folder),
    ):
        done = prep_here(*words, "--quiet")
        assert (done.returncode, "in a cache" in done.stderr) == (2, True), done.stderr
    assert tree(tmp_path / "c") == before
