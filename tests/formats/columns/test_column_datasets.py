"""A dataset with columns: written, read back, and damaged."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import PlanOptions, open_dataset, read_manifest
from shardprep.formats.errors import CorruptRecord, ManifestDamaged
from shardprep.formats.records.schema import Schema
from shardprep.formats.shards.read import CONTAINERS
from support.column_datasets import EVERY_KIND, every_kind, write_columns
from support.image_files import JPEG


@pytest.fixture(scope="module", params=CONTAINERS)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, options=PlanOptions(container=request.param, shard_size=9000))
    return folder


def equal(one: object, other: object) -> bool:
    if isinstance(other, np.ndarray):
        assert isinstance(one, np.ndarray)
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return type(one) is type(other) and one == other


def test_every_value_comes_back_with_its_record(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        assert opened.schema == EVERY_KIND
        assert len(opened.manifest.shards) > 1
        for record in opened:
            number = int(record.key[1:])
            expected = every_kind(number) | {"tags": np.array([number % 3], np.int32)}
            assert (record.label, record.image) == (number % 2, JPEG)
            assert tuple(record.columns) == EVERY_KIND.names
            for name, value in expected.items():
                assert equal(record[name], value), name


def test_a_record_is_still_a_tuple_and_can_be_pickled(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        record = opened[-1]
        key, label, image = record
        again = pickle.loads(pickle.dumps(record))  # noqa: S301 - of this test

    assert (key, label, image) == tuple(again) == (record[0], record[1], record[2])
    assert again["caption"] == record["caption"]
    with pytest.raises(KeyError, match="mask, sound, caption"):
        again["depth"]


def test_the_content_root_covers_each_column_and_not_the_container(tmp_path: Path) -> None:
    roots = set()
    for container in CONTAINERS:
        manifest = write_columns(
            tmp_path / container, options=PlanOptions(container=container, shard_size=9000)
        )
        roots.add((manifest.content_root, manifest.records_root))
        assert read_manifest(tmp_path / container) == manifest
    other = write_columns(tmp_path / "less", schema=Schema(EVERY_KIND.fields[:-1]))

    ((root, records_root),) = roots
    assert other.records_root == records_root
    assert other.content_root not in (root, records_root)


def test_a_cut_table_is_an_error(tmp_path: Path) -> None:
    write_columns(tmp_path / "d")
    table = tmp_path / "d" / "column-age.npy"
    table.write_bytes(table.read_bytes()[:-1])

    with open_dataset(tmp_path / "d") as opened, pytest.raises(ManifestDamaged, match="prep repair"):
        opened[0]["age"]


def test_a_value_of_another_record_is_found(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", schema=Schema({"age": "int"}))
    table = tmp_path / "d" / "column-age.npy"
    data = table.read_bytes()
    table.write_bytes(data[:-24] + data[-12:] + data[-24:-12])

    with open_dataset(tmp_path / "d") as opened, pytest.raises(CorruptRecord, match="age"):
        opened[-1]["age"]
