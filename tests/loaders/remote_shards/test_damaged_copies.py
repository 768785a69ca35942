"""A copy in a cache that the disk did not keep is fetched again; damage that was published is an error."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import CorruptRecord, ShardDamaged, open_dataset, read_manifest
from shardprep.formats.runtime.files import hash_file
from shardprep.loaders import Flow
from support.column_datasets import write_columns
from support.datasets import flip, prep_here, tree
from support.loaded import assert_same, epoch_of, loader_on
from support.resealed import reseal

MIDDLE, END = 0.5, 0.9  # of a shard: a byte of a record


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


@pytest.mark.parametrize(
    ("place", "workers", "on_bad_record"),
    [
        (MIDDLE, 0, "skip"),
        (END, 0, "raise"),
        pytest.param(MIDDLE, 1, "raise", marks=pytest.mark.slow),
        pytest.param(END, 1, "skip", marks=pytest.mark.torture),
    ],
)
def test_a_loader_delivers_every_record_and_counts_the_copy_that_it_replaced(
    lmdb_shards: Path, tmp_path: Path, place: float, workers: int, on_bad_record: str
) -> None:
    cache, options = tmp_path / "c", {"workers": workers, "on_bad_record": on_bad_record}
    with (
        loader_on(lmdb_shards, **options) as local,
        loader_on(lmdb_shards.as_uri(), cache=cache, **options) as remote,
    ):
        expected = epoch_of(local)
        assert_same(epoch_of(remote), expected)
    damaged = copies_of(cache, "shard")[3]
    flip(damaged, int(place * damaged.stat().st_size))

    for replaced in (1, 0):
        with loader_on(lmdb_shards.as_uri(), cache=cache, **options) as remote:
            assert_same(epoch_of(remote), expected)
            assert not remote.skipped
            assert remote.stats().storage.replaced == replaced
    assert hash_file(damaged) == f"sha256:{damaged.name}"


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


def test_damage_that_was_published_names_the_url_and_is_left_out_on_request(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(lmdb_shards, bad)
    shard = bad / read_manifest(bad).shards[2].name
    flip(shard, shard.stat().st_size // 2)
    reseal(bad, lambda manifest: manifest["shards"][2].update(sha256=hash_file(shard)))
    options: dict[str, Any] = {"cache": tmp_path / "c", "shuffle": None, "workers": 0}

    with loader_on(bad.as_uri(), **options) as loader, pytest.raises((CorruptRecord, ShardDamaged)) as caught:
        epoch_of(loader)
    with loader_on(bad.as_uri(), on_bad_record="skip", **options) as loader:
        epoch_of(loader)
        assert len(loader.skipped) == 1
        assert loader.stats().storage.replaced == 0

    assert (caught.value.path, caught.value.shard) == (bad.as_uri(), shard.name)
    assert "prep repair" not in str(caught.value)
    assert f"prep verify {bad.as_uri()} --cache" in str(caught.value)


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


def test_an_evicted_file_takes_no_room_unless_it_has_another_name(lmdb_shards: Path, tmp_path: Path) -> None:
    limit = read_manifest(lmdb_shards).size // 2
    with open_dataset(lmdb_shards.as_uri(), cache=tmp_path / "c", cache_limit=limit) as found:
        readers = [found.shard(0), found.shard(1)]
        copy, shared = (reader.path.resolve() for reader in readers)
        os.link(shared, tmp_path / "mine")
        expected = [record.key for record in found]

        assert not copy.exists() or not shared.exists()
        assert hash_file(tmp_path / "mine") == f"sha256:{shared.name}"
        assert [record.key for record in found] == expected
