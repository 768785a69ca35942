"""The same images have the same keys, labels and order from any source."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from shardprep.formats import open_dataset
from shardprep.formats.records.record import Record
from support.datasets import converted
from support.record_sources import write_shard, write_tfrecord

Rows = list[tuple[str, int, bytes, str]]


def records_in(path: Path) -> tuple[list[Record], list[str]]:
    """The records in their stored order, and the names of the classes."""
    with open_dataset(path) as dataset:
        names = [each.name for each in dataset.manifest.labels.classes]
        return [Record(record.key, record.label, record.image) for record in dataset], names


def webdataset(path: Path, rows: Rows) -> None:
    half = len(rows) // 2
    for number, some in enumerate((rows[:half], rows[half:])):
        parts = {
            key: {"jpeg": image, "cls": b"%d" % label, "classname": wnid.encode()}
            for key, label, image, wnid in some
        }
        write_shard(path / f"validation-{number:06d}.tar", parts)


def tfrecord(path: Path, rows: Rows) -> None:
    examples: Iterable[dict[str, bytes | int]] = (
        {
            "image/encoded": image,
            "image/class/label": label + 1,
            "image/class/synset": wnid.encode(),
            "image/filename": f"{key}.JPEG".encode(),
        }
        for key, label, image, wnid in rows
    )
    write_tfrecord(path / "validation-00000-of-00001", examples)


def parquet(path: Path, rows: Rows) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "image": [{"bytes": image, "path": f"{key}.JPEG"} for key, _, image, _ in rows],
            "label": [label for _, label, _, _ in rows],
        }
    )
    path.mkdir()
    pq.write_table(table, path / "validation-00000-of-00001.parquet", row_group_size=7)


@pytest.mark.parametrize("write", [webdataset, tfrecord, parquet])
def test_the_records_are_those_of_the_official_archives(
    write: Callable[[Path, Rows], None], archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "official", split="val")
    expected, names = records_in(tmp_path / "official")
    rows = sorted((record.key, record.label, record.image, names[record.label]) for record in expected)
    write(tmp_path / "source", rows)

    converted(tmp_path / "source", tmp_path / "again", split="val")
    found, again = records_in(tmp_path / "again")
    assert found == expected
    assert again == names or write is parquet
