"""Datasets of images that stay in the official tars."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats import (
    CorruptRecord,
    DataError,
    Manifest,
    ManifestDamaged,
    PlanOptions,
    ShardDamaged,
    SourceDamaged,
    UnknownVersion,
    UsageError,
    convert,
    open_dataset,
    read_manifest,
    repair,
    verify,
)
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.shards import manifest as manifest_checks
from shardprep.formats.shards.in_place import ARCHIVE_NAME, IndexedArchive, blocks_in
from shardprep.formats.shards.read import container
from support.datasets import converted, flip, tree
from support.resealed import with_rows
from support.sampling import torture_except

TRAIN = "ILSVRC2012_img_train.tar"
SIZE = 150_000


def indexed(source: Path, output: Path, **options: Any) -> Manifest:
    return converted(
        source, output, **({"container": "tar", "order": "archive", "shard_size": SIZE} | options)
    )


@pytest.fixture
def own(archives: Path, tmp_path: Path) -> Path:
    """A copy of the archives, which may be damaged."""
    return Path(shutil.copytree(archives, tmp_path / "archives"))


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


def test_no_byte_of_an_image_is_copied(own: Path, dataset: Path) -> None:
    files = [path for path in dataset.iterdir() if not path.is_symlink()]

    assert sum(path.stat().st_size for path in files) < (own / TRAIN).stat().st_size / 20
    assert (dataset / ARCHIVE_NAME).samefile(own / TRAIN)


def test_the_regions_are_the_whole_archive(own: Path, dataset: Path) -> None:
    archive = read_manifest(dataset).archive

    assert archive is not None
    assert archive.size == (own / TRAIN).stat().st_size
    assert [region.start for region in archive.regions[1:]] == [r.stop for r in archive.regions[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("split", torture_except(["val", "test"], "test"))
def test_the_other_tars_are_indexed_too(archives: Path, tmp_path: Path, split: str) -> None:
    indexed(archives, tmp_path / "out", split=split)
    converted(archives, tmp_path / "lmdb", split=split)

    assert content(tmp_path / "out") == content(tmp_path / "lmdb")
    assert verify(tmp_path / "out", level="decode").exit_code == 0


def test_shards_are_converted_from_it_as_from_the_archives(
    archives: Path, dataset: Path, tmp_path: Path
) -> None:
    ours = converted(dataset, tmp_path / "again", seed=3)

    assert ours.content_root == converted(archives, tmp_path / "lmdb", seed=3).content_root


def test_a_release_without_the_key_refuses_it(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(key for key in manifest_checks.CRITICAL_KEYS if key != "archive")
    monkeypatch.setattr(manifest_checks, "CRITICAL_KEYS", known)

    with pytest.raises(UnknownVersion, match="archive"):
        open_dataset(dataset)


def cut(archive: Path) -> None:
    os.truncate(archive, archive.stat().st_size - 5000)


def grown(archive: Path) -> None:
    with archive.open("ab") as file:
        file.write(bytes(512))


def gone(archive: Path) -> None:
    archive.unlink()


def folder_instead(archive: Path) -> None:
    archive.unlink()
    archive.mkdir()


def fifo_instead(archive: Path) -> None:
    archive.unlink()
    os.mkfifo(archive)


@pytest.mark.parametrize("change", [cut, grown, gone, folder_instead, fifo_instead])
def test_an_archive_of_another_size_or_none_is_an_error_that_names_it(
    own: Path, dataset: Path, change: Callable[[Path], None]
) -> None:
    change(own / TRAIN)

    with pytest.raises(ShardDamaged, match="prep index") as raised:
        open_dataset(dataset)
    assert raised.value.path == str(own / TRAIN)
    for level in ("quick", "full", "records"):
        report = verify(dataset, level=level)
        assert [finding.file for finding in report.findings] == [ARCHIVE_NAME]
        assert report.exit_code == 1
        assert str(own / TRAIN) in report.findings[0].problem


def test_an_archive_that_is_cut_after_it_was_opened_gives_errors_and_no_signal(
    own: Path, dataset: Path
) -> None:
    with open_dataset(dataset) as opened:
        first = opened[0]
        os.truncate(own / TRAIN, offsets(dataset)[1] + 3)

        assert opened[0] == first
        for number in range(1, len(opened)):
            with pytest.raises(ShardDamaged, match="prep index") as raised:
                opened[number]
            assert raised.value.path == str(own / TRAIN)


def test_a_changed_image_is_never_given(own: Path, dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        victim = opened[7].key
    flip(own / TRAIN, offsets(dataset)[7] + 400)

    with open_dataset(dataset) as opened:
        with pytest.raises(CorruptRecord, match=r"the archive.*has changed") as raised:
            opened[7]
        assert (raised.value.path, raised.value.key) == (str(own / TRAIN), victim)
        assert opened[6].image
        assert opened[8].image
    assert verify(dataset, level="quick").findings == []
    assert [finding.file for finding in verify(dataset).findings] == [ARCHIVE_NAME]


@pytest.mark.slow
def test_records_level_names_the_region_and_the_record(own: Path, dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        victim, table = opened[7].key, opened.manifest.shards[int(opened.index["shard"][7])].name
    flip(own / TRAIN, offsets(dataset)[7] + 400)

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


def test_an_archive_with_the_same_images_at_other_places_is_another_one(own: Path, dataset: Path) -> None:
    data = (own / TRAIN).read_bytes()
    (own / TRAIN).write_bytes(data[512:] + data[:512])

    with open_dataset(dataset) as opened:
        for number in range(len(opened)):
            with pytest.raises(CorruptRecord):
                opened[number]


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


def test_the_same_command_refuses_an_archive_with_other_bytes(own: Path, dataset: Path) -> None:
    flip(own / TRAIN, offsets(dataset)[3] + 100)

    with pytest.raises(DataError, match="prep index into another folder") as raised:
        indexed(own, dataset)
    assert "prep repair" not in str(raised.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", (1 << 64) - 1),
        ("offset", 1 << 40),
        ("length", (1 << 32) - 1),
        ("length", 1 << 26),
        ("offset", 5),
    ],
)
def test_a_hostile_address_is_an_error_in_the_index_and_in_a_table(
    dataset: Path, column: str, value: int
) -> None:
    def change(rows: np.ndarray) -> None:
        rows[column][1] = value

    table = min(dataset.glob("shard-*.tar.npy"))
    with_rows(dataset, table.name, change)
    with pytest.raises((ShardDamaged, CorruptRecord)), container("tar").read(table) as reader:
        reader.checked(1)
    assert verify(dataset, level="records").findings
    with_rows(dataset, "index.npy", change)
    with pytest.raises((ManifestDamaged, ShardDamaged, CorruptRecord)), open_dataset(dataset) as opened:
        opened[1]


def test_a_damaged_table_is_rebuilt_to_the_same_root_and_no_archive_is(own: Path, dataset: Path) -> None:
    root, table = read_manifest(dataset).root, sorted(dataset.glob("shard-*.tar.npy"))[1]
    flip(table, table.stat().st_size - 9)
    assert [finding.file for finding in verify(dataset).findings] == [table.name]

    report = repair(dataset, own, workers=0)

    assert (report.exit_code, report.rebuilt, read_manifest(dataset).root) == (0, (table.name,), root)
    flip(own / TRAIN, offsets(dataset)[3] + 100)
    with pytest.raises(SourceDamaged, match="prep repair rebuilds tables but no archive"):
        repair(dataset, own, workers=0)


def sealed(dataset: Path, change: dict[str, Any]) -> bytes:
    body = parse_canonical_json((dataset / "manifest.json").read_bytes()) | change
    del body["root"]
    return canonical_json(body | {"root": sha256_of(body)})


@pytest.mark.parametrize(
    "change",
    [
        {"regions": []},
        {"regions": [{"size": -1, "sha256": "sha256:" + "0" * 64}]},
        {"regions": [{"size": 1 << 62, "sha256": "sha256:" + "0" * 64}] * 9},
        {"regions": [{"size": 5, "sha256": "../x"}]},
        {"block_bytes": 0},
        {"name": None},
    ],
)
def test_a_hostile_archive_in_a_manifest_is_refused(dataset: Path, change: dict[str, Any]) -> None:
    archive = parse_canonical_json((dataset / "manifest.json").read_bytes())["archive"]

    with pytest.raises(ManifestDamaged, match="archive"):
        Manifest.parse(sealed(dataset, {"archive": archive | change}))
    with pytest.raises(ManifestDamaged, match="archive"):
        Manifest.parse(sealed(dataset, {"container": "lmdb"}))


@pytest.mark.slow
def test_any_number_of_workers_makes_the_same_bytes(archives: Path, dataset: Path, tmp_path: Path) -> None:
    indexed(archives, tmp_path / "two", workers=2)

    assert tree_of(tmp_path / "two") == tree_of(dataset)


def tree_of(dataset: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(dataset).items() if name != ARCHIVE_NAME}


def test_only_official_tars_are_indexed(lmdb_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="official tar"):
        indexed(lmdb_shards, tmp_path / "out")
    with pytest.raises(UsageError, match="order must be"):
        PlanOptions(container="tar")
    with pytest.raises(UsageError, match="order must be"):
        PlanOptions(order="archive")
    with pytest.raises(UsageError, match="re-encoded"):
        PlanOptions(container="tar", order="archive", crop_ready=True)


def test_every_split_of_the_tars_is_indexed(own: Path, tmp_path: Path) -> None:
    options = PlanOptions(container="tar", order="archive")

    done = convert(own, tmp_path / "out", plan_options=options, workers=0)

    assert [one.path.name for one in done] == ["train", "val", "test"]
    assert {one.manifest.container for one in done} == {"tar"}


@given(
    regions=st.lists(st.lists(st.integers(1, 400), max_size=30), min_size=1, max_size=5),
    block_bytes=st.integers(1, 2000),
)
def test_blocks_are_all_records_in_order_each_within_its_region(
    regions: list[list[int]], block_bytes: int
) -> None:
    sizes = tuple(sum(length + 1024 for length in lengths) for lengths in regions)
    archive = IndexedArchive("a.tar", sizes, ("",) * len(sizes), block_bytes)
    counts = [len(lengths) for lengths in regions]
    lengths = np.array([length for some in regions for length in some], np.uint32)

    blocks = blocks_in(archive, counts, lengths)

    ends = np.cumsum([block.records for block in blocks], dtype=np.int64)
    assert (ends[-1] if blocks else 0) == len(lengths)
    assert set(np.cumsum(counts)) - {0} <= set(ends.tolist())
    bytes_of = [int(some.sum()) for some in np.split(lengths, ends[:-1])] if blocks else []
    assert all(size < block_bytes + 400 for size in bytes_of)
    regions_of = {(region.start, region.stop) for region in archive.regions}
    for block in blocks:
        assert any(start <= block.start <= block.start + block.size <= stop for start, stop in regions_of)
    assert all(one.start + one.size <= other.start for one, other in pairwise(blocks))
