"""Datasets of images that stay in the official tars."""

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import Manifest, join, open_dataset, read_manifest, verify
from shardprep.formats.errors import CorruptRecord, ManifestDamaged, ShardDamaged, UsageError
from shardprep.formats.shards.read import ARCHIVE_NAME, Shard
from support.datasets import converted, flip
from support.file_changes import CHANGES
from support.resealed import reseal, with_rows

TRAIN = "ILSVRC2012_img_train.tar"


def indexed(source: Path, output: Path) -> Manifest:
    return converted(source, output, container="tar", order="archive", shard_size=150_000)


@pytest.fixture
def dataset(own: Path, tmp_path: Path) -> Path:
    """An index of these archives' train split, in several tables."""
    indexed(own, tmp_path / "out")
    return tmp_path / "out"


def content(dataset: Path) -> dict[str, tuple[int, bytes]]:
    with open_dataset(dataset) as opened:
        return {record.key: (record.label, record.image) for record in opened}


def offsets(dataset: Path) -> list[int]:
    """Where the images begin in the archive, read as the documentation says."""
    tables = [np.load(path) for path in sorted(dataset.glob("shard-*.tar.npy"))]
    return [int(offset) for table in tables for offset in table["offset"]]


def test_the_records_are_those_of_shards_in_the_order_of_the_archive(
    archives: Path, dataset: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "lmdb")
    manifest = read_manifest(dataset)

    assert content(dataset) == content(tmp_path / "lmdb")
    assert len(manifest.shards) > 2
    assert offsets(dataset) == sorted(offsets(dataset))
    assert manifest.class_sorted


@pytest.mark.parametrize("change", ["cut", "grown", "gone", "a folder", "a fifo"])
def test_an_archive_of_another_size_or_none_is_an_error_that_names_it(
    own: Path, dataset: Path, change: str
) -> None:
    CHANGES[change](own / TRAIN)

    with pytest.raises(ShardDamaged, match="prep index") as raised:
        open_dataset(dataset)
    assert raised.value.path == str(own / TRAIN)
    for level in ("quick", "full", "records"):
        report = verify(dataset, level=level)
        assert [finding.file for finding in report.findings] == [ARCHIVE_NAME]
        assert report.exit_code == 1
        assert str(own / TRAIN) in report.findings[0].problem


@pytest.mark.slow
def test_a_changed_image_is_never_given_and_named_at_records_level(own: Path, dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        victim, table = opened[7].key, opened.manifest.shards[int(opened.index["shard"][7])].name
    flip(own / TRAIN, offsets(dataset)[7] + 400)

    with open_dataset(dataset) as opened:
        with pytest.raises(CorruptRecord, match=r"the archive.*has changed") as raised:
            opened[7]
        assert (raised.value.path, raised.value.key) == (str(own / TRAIN), victim)
        assert opened[6].image
        assert opened[8].image
    assert verify(dataset, level="quick").findings == []
    assert [finding.file for finding in verify(dataset).findings] == [ARCHIVE_NAME]
    found = verify(dataset, level="records").findings
    assert [(finding.file, finding.key) for finding in found] == [(ARCHIVE_NAME, None), (table, victim)]


def test_any_flipped_bit_of_the_archive_is_found_by_its_hash(own: Path, dataset: Path) -> None:
    rng, intact = random.Random(0), content(dataset)
    for _ in range(30):
        position, bit = rng.randrange((own / TRAIN).stat().st_size), rng.randrange(8)
        flip(own / TRAIN, position, bit)
        with open_dataset(dataset) as opened:
            for number, (key, (label, image)) in enumerate(intact.items()):
                with suppress(CorruptRecord):
                    assert opened[number] == (key, label, image)

        assert [finding.file for finding in verify(dataset, workers=1).findings] == [ARCHIVE_NAME]
        flip(own / TRAIN, position, bit)


def test_an_archive_that_moved_is_linked_by_the_same_command_with_its_new_place(
    own: Path, dataset: Path, tmp_path: Path
) -> None:
    before = content(dataset)
    moved = own.rename(tmp_path / "moved")
    with pytest.raises(ShardDamaged, match="is not there"):
        open_dataset(dataset)

    indexed(moved, dataset)

    assert content(dataset) == before
    assert (dataset / ARCHIVE_NAME).samefile(moved / TRAIN)
    (dataset / ARCHIVE_NAME).unlink()
    shutil.copy(moved / TRAIN, dataset / ARCHIVE_NAME)  # the archive itself, as on another machine
    assert content(dataset) == before
    assert verify(dataset).exit_code == 0


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("offset", offset) for offset in ((1 << 64) - 1, 1 << 40, 5)),
        *(("length", length) for length in ((1 << 32) - 1, 1 << 26)),
    ],
)
def test_a_hostile_address_is_an_error_in_index_and_table(dataset: Path, column: str, value: int) -> None:
    def change(rows: np.ndarray) -> None:
        rows[column][1] = value

    table = min(dataset.glob("shard-*.tar.npy"))
    with_rows(dataset, table.name, change)
    with pytest.raises((ShardDamaged, CorruptRecord)), Shard(table, "tar") as reader:
        reader.read_record(1)
    assert verify(dataset, level="records").findings
    with_rows(dataset, "index.npy", change)
    with pytest.raises((ManifestDamaged, ShardDamaged, CorruptRecord)), open_dataset(dataset) as opened:
        opened[1]


@pytest.mark.parametrize(
    "change",
    [
        {"regions": []},
        {"regions": [{"size": -1, "sha256": "sha256:" + "0" * 64}]},
        {"regions": [{"size": 1 << 62, "sha256": "sha256:" + "0" * 64}] * 9},
        {"regions": [{"size": 5, "sha256": "../x"}]},
        {"block_bytes": 0},
        {"name": None},
        {"container": "lmdb"},
    ],
)
def test_a_hostile_archive_in_a_manifest_is_refused(dataset: Path, change: dict[str, Any]) -> None:
    part = "archive" if "container" not in change else ""
    reseal(dataset, lambda manifest: manifest.get(part, manifest).update(change))

    with pytest.raises(ManifestDamaged, match="archive"):
        read_manifest(dataset)


def test_only_official_tars_are_indexed_and_only_shards_are_joined(
    lmdb_shards: Path, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="official tar"):
        indexed(lmdb_shards, tmp_path / "other")
    with pytest.raises(UsageError, match="convert it to shards with prep convert"):
        join(dataset, {"row": dataset / "index.npy"}, workers=0)
