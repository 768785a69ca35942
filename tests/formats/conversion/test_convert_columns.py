"""A dataset with columns as a source: converted, killed in between, and repaired."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    BadImage,
    PlanMismatch,
    PlanOptions,
    open_dataset,
    plan_conversion,
    read_manifest,
    repair,
    verify,
)
from shardprep.formats.records.schema import Schema
from support.column_datasets import EVERY_KIND, write_columns
from support.datasets import converted, flip, prep, tree, writable

STRACE = shutil.which("strace")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "source"
    write_columns(folder, 20, options=PlanOptions(shard_size=9000))
    return folder


def contents(dataset: Path) -> dict[str, tuple[int, bytes, tuple[bytes, ...]]]:
    """Label, image and encoded values of each record."""
    with open_dataset(dataset) as opened:
        return {
            record.key: (
                record.label,
                record.image,
                tuple(
                    reader.data(opened.place(n))
                    for reader in map(opened.columns.__getitem__, opened.columns.names)
                ),
            )
            for n, record in enumerate(opened)
        }


OTHERWISE = [
    {"container": "hdf5", "shard_size": 3000},
    {"container": "lmdb", "order": "key", "shard_size": 1 << 20},
    {"seed": 7, "crop_ready": True},
]


@pytest.mark.parametrize("options", OTHERWISE)
def test_columns_are_carried_over_record_by_record(
    source: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    manifest = converted(source, tmp_path / "out", **options)

    assert manifest.schema == EVERY_KIND
    assert manifest.source["dataset"]["root"] == read_manifest(source).root
    found, expected = contents(tmp_path / "out"), contents(source)
    if not options.get("crop_ready"):
        assert found == expected
    assert {key: (parts[0], parts[2]) for key, parts in found.items()} == {
        key: (parts[0], parts[2]) for key, parts in expected.items()
    }


def test_a_copy_has_the_content_root_of_its_source(source: Path, tmp_path: Path) -> None:
    same = converted(source, tmp_path / "out", container="hdf5", **like(source))

    assert same.content_root == read_manifest(source).content_root


def like(dataset: Path) -> dict[str, object]:
    plan = read_manifest(dataset).plan
    return {"order": plan["order"], "seed": plan["seed"]}


def test_records_without_images_are_carried_over(tmp_path: Path) -> None:
    write_columns(tmp_path / "source", image=None)

    manifest = converted(tmp_path / "source", tmp_path / "out", container="hdf5")

    assert not manifest.has_images
    assert contents(tmp_path / "out") == contents(tmp_path / "source")


@pytest.mark.parametrize("has_images", [True, False])
def test_a_dry_run_reads_columns_and_finds_no_problem(tmp_path: Path, has_images: bool) -> None:
    write_columns(tmp_path / "source", **({} if has_images else {"image": None}))

    found = plan_conversion(tmp_path / "source", tmp_path / "out", split="train", workers=0)

    assert (list(found.problems), list(found.skipped), found.splits[0].images) == ([], [], 12)


def test_a_bad_value_is_skipped_with_its_record(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="column caption"):
        write_columns(tmp_path / "failed", bad=5)
    manifest = write_columns(tmp_path / "d", bad=5, options=PlanOptions(on_bad_image="skip", shard_size=9000))

    assert (manifest.records, manifest.skipped) == (11, 1)
    assert "k0005" not in contents(tmp_path / "d")
    assert verify(tmp_path / "d").findings == []
    assert b"k0005" in (tmp_path / "d" / "quarantine.json").read_bytes()


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    """A dataset that was converted from the source, to be damaged."""
    converted(source, tmp_path / "copied", container="hdf5", shard_size=9000)
    return tmp_path / "copied"


DAMAGED = [
    ("column-mask-00001.h5",),
    ("column-caption-00000.h5", "column-caption-00001.h5", "shard-00001.h5"),
    ("column-age.npy",),
    ("column-sound.npy", "column-sound-00000.h5"),
    ("index.npy", "column-vector.npy"),
]


@pytest.mark.parametrize("names", DAMAGED)
def test_exactly_the_damaged_files_are_rebuilt(source: Path, copied: Path, names: tuple[str, ...]) -> None:
    before = tree(copied)
    inodes = {path.name: path.stat().st_ino for path in copied.iterdir()}
    for name in names[1:]:
        (copied / name).unlink()
    flip(copied / names[0], 200)

    report = repair(copied, source, workers=0)

    assert (report.exit_code, report.rebuilt) == (0, tuple(sorted(names)))
    assert tree(copied) == before
    kept = {path.name: path.stat().st_ino for path in copied.iterdir() if path.name not in names}
    assert kept == {name: inode for name, inode in inodes.items() if name not in names}


@pytest.mark.torture
def test_every_damaged_file_of_the_columns_is_rebuilt_by_the_command(source: Path, copied: Path) -> None:
    before = tree(copied)
    for number, path in enumerate(sorted(copied.glob("column-*"))):
        writable(path).write_bytes(path.read_bytes()[: 100 * (number % 3)])

    done = prep("repair", copied, "--source", source)

    assert done.returncode == 0, done.stderr
    assert tree(copied) == before


def test_a_source_with_another_value_publishes_nothing(tmp_path: Path) -> None:
    schema = Schema([EVERY_KIND["age"], EVERY_KIND["caption"]])
    write_columns(tmp_path / "source", 4, schema)
    converted(tmp_path / "source", tmp_path / "out")
    shutil.rmtree(tmp_path / "source")
    write_columns(tmp_path / "source", 4, schema, instead={"age": bytes([7, *bytes(7)])})
    damaged = tmp_path / "out" / "column-age.npy"
    damaged.unlink()

    with pytest.raises(PlanMismatch, match="another source"):
        repair(tmp_path / "out", tmp_path / "source", workers=0)

    assert not damaged.exists()
    assert np.load(tmp_path / "out" / "index.npy").size == 4
