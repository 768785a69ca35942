"""Datasets of earlier versions stay readable; those of format 1.0 are as good as those of today."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import PlanOptions, collect, join, open_dataset, read_manifest, repair, verify
from shardprep.formats.conversion.plan import make_plan
from shardprep.formats.shards import columns, read
from shardprep.formats.shards.read import container
from shardprep.formats.sources.recognise import recognise
from shardprep.loaders import Flow
from support.column_datasets import write_columns
from support.datasets import converted, flip, tree
from support.loaded import assert_same, epoch_of, loader_on
from support.repository import GOLDEN
from support.resealed import reseal


def earlier(dataset: Path, folder: Path, plan_sha256: str | None = None) -> Path:
    """A copy of a dataset as 0.2 wrote it."""
    shutil.copytree(dataset, folder, symlinks=True)
    for path in [folder / "index.npy", *folder.glob("column-*.npy")]:
        rows = np.load(path)
        names = [name for name in rows.dtype.names if name != "offset"]
        path.chmod(0o644)
        np.save(path, rows[names].astype([(name, rows.dtype[name]) for name in names]))

    def change(manifest: dict[str, Any]) -> None:
        del manifest["offsets"]
        manifest["crit"].remove("offsets")
        manifest["version"] = [1, 0]
        if plan_sha256:
            manifest["plan"]["sha256"] = plan_sha256

    reseal(folder, change)
    return folder


@pytest.fixture(params=["lmdb", "hdf5", "tar"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def now(archives: Path, tmp_path: Path, kind: str) -> Path:
    converted(archives, tmp_path / "now", container=kind, **({"order": "archive"} if kind == "tar" else {}))
    return tmp_path / "now"


@pytest.fixture
def before(archives: Path, now: Path, tmp_path: Path) -> Path:
    made = read_manifest(now).plan
    options = PlanOptions(**{name: made[name] for name in ("container", "shard_size", "order", "seed")})
    planned = make_plan(recognise(archives).listing("train"), options, version=(1, 0))
    return earlier(now, tmp_path / "before", planned.digest)


def test_its_records_and_batches_are_those_of_today(now: Path, before: Path) -> None:
    new, old = read_manifest(now), read_manifest(before)
    assert (new.version, new.offsets, old.version, old.offsets) == ((1, 1), True, (1, 0), False)
    assert new.content_root == old.content_root
    with open_dataset(now) as one, open_dataset(before) as other:
        assert list(one) == list(other)
        assert (other.index["offset"].any(), other.index.flags.writeable) == (False, False)
    assert list(Flow.from_dataset(before)) == list(Flow.from_dataset(now))
    for options in ({"transform": None}, {"workers": 1}):
        with loader_on(now, **options) as one, loader_on(before, **options) as other:
            assert_same(epoch_of(one), epoch_of(other))


def test_it_is_searched_once_for_addresses(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(read, "container", lambda name: searched.append(name) or container(name))
    monkeypatch.setattr(columns, "MAX_OPEN", 1)
    with open_dataset(before) as dataset:
        assert list(dataset) == list(dataset)
        assert len(searched) == len(dataset.manifest.shards) > 1


def test_it_is_verified_record_by_record(before: Path) -> None:
    assert verify(before, level="records").exit_code == 0
    rows = np.load(before / "index.npy")
    rows["crc32c"][3] ^= 1
    np.save(before / "index.npy", rows)
    reseal(before)

    assert [finding.key for finding in verify(before, level="records").findings] == [rows["key"][3].decode()]


def test_it_is_repaired_to_its_own_bytes_and_complete(archives: Path, before: Path, kind: str) -> None:
    expected = tree(before)
    for name in ("index.npy", read_manifest(before).shards[1].name):
        flip(before / name, (before / name).stat().st_size - 9)

    assert repair(before, archives, workers=0).exit_code == 0
    converted(archives, before, container=kind, order=read_manifest(before).plan["order"])
    assert tree(before) == expected


@pytest.mark.parametrize("kind", ["lmdb", "hdf5"], indirect=True)
def test_columns_join_it_in_its_own_version(now: Path, before: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.csv"
    with open_dataset(now) as dataset:
        rows = [f"{record.key},{'é' * (number % 7)}\n" for number, record in enumerate(dataset)]
    texts.write_text("".join(["key,caption\n", *rows]))

    for dataset in (now, before):
        join(dataset, {"caption:text": texts}, workers=0)

    assert read_manifest(before).version == (1, 0)
    assert read_manifest(before).content_root == read_manifest(now).content_root
    assert verify(before, level="decode").exit_code == 0
    with open_dataset(now) as one, open_dataset(before) as other:
        assert [r["caption"] for r in one] == [r["caption"] for r in other]


def test_a_collection_has_parts_of_both(now: Path, before: Path, tmp_path: Path) -> None:
    with collect(tmp_path / "all", [now, before]) as both, open_dataset(now) as one:
        assert list(both) == [*one, *one]
        assert both.index["offset"][len(one)] == 0 < both.index["offset"][0]


@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_columns_of_every_kind_are_read(tmp_path: Path, container: str) -> None:
    write_columns(tmp_path / "now", options=PlanOptions(container, shard_size=5000))
    before = earlier(tmp_path / "now", tmp_path / "before")

    with open_dataset(tmp_path / "now") as one, open_dataset(before) as other:
        for record, same in zip(one, other, strict=True):
            assert repr(dict(record.columns)) == repr(dict(same.columns))
    assert verify(before, level="decode").exit_code == 0


DATASETS = sorted(path.parent for path in GOLDEN.glob("*/*/manifest.json"))
CONTENT_ROOT = "blake3:7ac8994a968220d7e9c248c53024ede553743464f1c393a925064a821dd5421d"


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS, ids=lambda p: "-".join(p.parts[-2:]))
def test_it_verifies_and_reads(dataset: Path) -> None:
    assert {path.name for path in DATASETS} == {"hdf5", "lmdb"}
    report = verify(dataset, level="decode")

    assert (report.findings, report.unchecked) == ([], [])
    assert report.manifest is not None
    assert report.manifest.content_root == CONTENT_ROOT
    with open_dataset(dataset) as ds:
        assert sorted((r.key, r.label) for r in ds) == [
            (f"{name}/{number}{'.png' if number == 2 else '.jpg'}", label)
            for label, name in enumerate(["ape", "bee", "cat"])
            for number in range(3)
        ]
