"""The making and opening of collections, and what is refused."""

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    collect,
    convert,
    open_collection,
    open_dataset,
    publish,
    read_manifest,
    repair,
    verify,
)
from shardprep.formats.errors import DataError, ManifestDamaged, SourceDamaged, UnknownVersion, UsageError
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.work_folder import WorkFolder, make_run_folder
from shardprep.formats.shards.dataset import RecordSet
from shardprep.formats.storage import open as collections
from support.cut_datasets import collected, cut
from support.datasets import prep_here, writable


@pytest.fixture
def parts(lmdb_shards: Path, tmp_path: Path) -> list[Path]:
    return cut(lmdb_shards, tmp_path, 2, 5)


@pytest.fixture
def folder(parts: list[Path], tmp_path: Path) -> Path:
    with collect(tmp_path / "all", parts):
        return tmp_path / "all"


def test_a_collection_keeps_its_root_where_it_moves_with_its_parts_and_names_their_folders(
    folder: Path, tmp_path: Path
) -> None:
    with open_collection(folder) as before:
        first = before[0]
    (tmp_path / "moved").mkdir()
    for each in (folder, *tmp_path.glob("part-*")):
        each.rename(tmp_path / "moved" / each.name)

    with open_collection(tmp_path / "moved/all") as after:
        assert (after.root, after[0]) == (before.root, first)
    assert f"{tmp_path}/moved/part-0: intact" in prep_here("verify", tmp_path / "moved/all").stdout
    (tmp_path / "link").symlink_to("moved/all")  # part-0 is not beside the link
    assert f"{tmp_path}/link/../part-0: intact" in prep_here("verify", tmp_path / "link").stdout


def test_making_it_again_changes_nothing_and_another_is_refused(folder: Path, parts: list[Path]) -> None:
    before = (folder / "collection.json").read_bytes()
    collect(folder, parts).close()
    assert (folder / "collection.json").read_bytes() == before

    with pytest.raises(UsageError, match="holds another collection"):
        collect(folder, parts[::-1])
    with pytest.raises(UsageError, match="holds a dataset"):
        collect(parts[0], parts)
    with pytest.raises(UsageError, match="in the folder of a dataset"):
        collect(parts[0] / "below", parts)
    collect(parts[0] / "../beside", parts).close()
    with pytest.raises(UsageError, match="is a collection; give its parts"):
        collect(folder.parent / "other", [folder])
    for given_parts, said in (([], "1 to 4096 parts"), ([parts[0], parts[0]], "given twice")):
        with pytest.raises(UsageError, match=said):
            collect(folder.parent / "other", given_parts)
    with pytest.raises(UsageError, match="parts must be a list of paths"):
        collect(folder.parent / "other", str(parts[0]))


def test_another_run_keeps_its_unfinished_file_and_a_killed_one_does_not(
    parts: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "all"
    with WorkFolder(folder, shared=True) as other:
        unfinished, left = other.run / "collection.json.0a.tmp", make_run_folder(other.folder)
        unfinished.touch()
        collect(folder, parts).close()
        assert unfinished.exists()
        assert not left.exists()
    collect(folder, parts).close()
    assert [*folder.iterdir()] == [folder / "collection.json"]


def test_unfinished_work_in_the_folder_is_left_alone(folder: Path, parts: list[Path]) -> None:
    with WorkFolder(folder) as other:
        other.claim({"dataset": "another"})
    with pytest.raises(UsageError, match="holds unfinished work"):
        collect(folder, parts)

    assert (folder / ".prep/plan.json").exists()


def test_parts_that_differ_are_refused_with_the_first_difference(parts: list[Path], tmp_path: Path) -> None:
    manifest = read_manifest(parts[1])
    for labels, said in (
        (LabelSpace.of(["n0", "n1", "n2", "n3"]), "one has the label 0 for .*, the other .* 'n0' with"),
        (LabelSpace(manifest.labels.classes[:-1]), "one has 4 classes, the other 3 classes"),
    ):
        writable(parts[1] / "manifest.json").write_bytes(replace(manifest, labels=labels).to_bytes())
        with pytest.raises(UsageError, match=rf"part-0 and part-1 cannot be one collection: {said}"):
            collect(tmp_path / "all", parts)
    assert not (tmp_path / "all").exists()


def test_a_part_that_changed_or_is_gone_is_refused_by_name(folder: Path, parts: list[Path]) -> None:
    with open_collection(folder) as dataset, pytest.raises(SourceDamaged, match="was replaced by another"):
        dataset.__setstate__([{"": "of a pickle"}])
    writable(parts[1] / "manifest.json").write_bytes(replace(read_manifest(parts[1]), skipped=7).to_bytes())

    with pytest.raises(DataError, match="the part part-1 is not the dataset that was collected"):
        open_collection(folder)
    done = prep_here("verify", folder)
    assert done.returncode == 1
    assert "part-1 is not the dataset that was collected" in done.stderr
    shutil.rmtree(parts[1])
    with pytest.raises(ManifestDamaged, match="the part part-1: there is no such folder"):
        open_collection(folder)


def test_a_damaged_file_is_refused(folder: Path) -> None:
    path = folder / "collection.json"
    whole = json.loads(path.read_bytes())
    part = whole["parts"][0]
    for changes, kind, said in (
        ({"version": 2}, UnknownVersion, "version 2"),
        ({"version": True}, ManifestDamaged, "is a damaged collection .*; repeat prep collect"),
        ({"format": "other"}, ManifestDamaged, "not a collection"),
        ({"more": 1}, ManifestDamaged, "inconsistent"),
        ({"parts": []}, ManifestDamaged, "1 to 4096 named parts"),
        ({"parts": [part, part]}, ManifestDamaged, "1 to 4096 named parts"),
        ({"parts": [part | {"records": -1}]}, ManifestDamaged, "-1 is not a number"),
        ({"parts": [part | {"path": ""}]}, ManifestDamaged, "cannot be a path"),
        ({"parts": [part | {"path": "a\0b"}]}, ManifestDamaged, "cannot be a path"),
        ({"parts": [part | {"name": "\ud800"}]}, ManifestDamaged, "surrogates not allowed"),
        ({"parts": whole["parts"][::-1]}, ManifestDamaged, "own root"),
    ):
        writable(path).write_bytes(canonical_json(whole | changes))
        with pytest.raises(kind, match=said):
            open_collection(folder)


def test_commands_take_a_collection_for_what_it_is(parts: list[Path], tmp_path: Path) -> None:
    collect(tmp_path, parts).close()  # parts below it are not its splits

    assert prep_here("repair", tmp_path, "--source", tmp_path).returncode == 2
    for call in (
        open_dataset,
        read_manifest,
        verify,
        partial(convert, output=tmp_path / "out", workers=0),
        partial(repair, source=tmp_path),
        partial(publish, url=tmp_path.as_uri()),
    ):
        with pytest.raises(UsageError, match="is a collection; give its parts"):
            call(tmp_path)
    done = prep_here("bench-loader", tmp_path, "--seconds", "0.1", "--workers", "0", "--quiet", "--json")
    assert json.loads(done.stdout)["dataset"] == str(tmp_path)


@pytest.fixture(scope="module")
def three_parts(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of three parts, of one, several and all other shards."""
    return collected(lmdb_shards, tmp_path_factory.mktemp("cut"), 1, 4)


@pytest.fixture(params=["dataset", "collection", "collection that reads rows"])
def records(
    request: pytest.FixtureRequest, lmdb_shards: Path, three_parts: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RecordSet]:
    if request.param == "collection that reads rows":
        monkeypatch.setattr(collections, "MAX_INDEX_BYTES", 0)
    is_dataset = request.param == "dataset"
    with open_dataset(lmdb_shards) if is_dataset else open_collection(three_parts) as opened:
        yield opened


def test_a_copy_has_the_same_records_and_the_index_gives_rows_by_number_slice_array_and_column(
    records: RecordSet, lmdb_shards: Path
) -> None:
    index, numbers = records.index, np.random.default_rng(0).integers(0, 204, 500)
    with open_dataset(lmdb_shards) as dataset:
        whole = dataset.index

    assert (len(index), index.dtype) == (204, whole.dtype)
    slices = (slice(7, 99), slice(3, 90, 7), slice(90, 3, -7))
    arrays = (numbers, numbers - 204, np.array([], np.int64), [203, -204, 7], whole["label"] >= 5)
    for chosen in (203, -1, *slices, *arrays):
        assert index[chosen].tobytes() == whole[chosen].tobytes()
    for wrong in (204, -205, np.array([0, 204]), np.ones(203, bool)):
        with pytest.raises(IndexError):
            index[wrong]
    for name in whole.dtype.names or ():
        assert index[name].tolist() == whole[name].tolist()
    for made in (copy.copy(records), copy.deepcopy(records)):
        with made:
            assert (made.root, made[100]) == (records.root, records[100])
