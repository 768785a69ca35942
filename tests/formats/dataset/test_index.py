"""The index is in memory once a dataset is open; what it says of a record is compared with the record."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import CorruptRecord
from support.datasets import writable
from support.loaded import epoch_of, loader_on
from support.resealed import reseal
from support.sampling import torture_except


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    """A dataset that may be damaged."""
    return Path(shutil.copytree(lmdb_shards, tmp_path / "copy"))


def changed_row(dataset: Path, number: int, column: str, value: object) -> str:
    """Publish the dataset again with another index; return the key that the row had."""
    rows = np.load(dataset / "index.npy").copy()
    key: bytes = rows["key"][number]
    rows[column][number] = value
    np.save(writable(dataset / "index.npy"), rows)
    reseal(dataset)
    return key.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "column", "value"),
    torture_except(
        [
            (1, "label", 3),
            (0, "label", 3),
            (0, "label", -1),
            (0, "key", b"n1/other"),
            (0, "crc32c", 7),
            (0, "offset", 100),
        ],
        (0, "label", 3),
        (0, "label", -1),
        (0, "key", b"n1/other"),
        (0, "crc32c", 7),
        (0, "offset", 100),
    ),
)
def test_a_record_that_is_not_as_the_index_says_is_corrupt(
    copy: Path, workers: int, column: str, value: object
) -> None:
    with open_dataset(copy) as dataset:
        number = next(n for n in range(20, 204) if dataset.index["label"][n] not in (3, -1))
    key = changed_row(copy, number, column, value)
    if column == "key":
        key = bytes(value).decode()

    for transform in ({"transform": None}, {}):
        with (
            loader_on(copy, workers=workers, shuffle=None, **transform) as loader,
            pytest.raises(CorruptRecord, match="does not match its CRC-32C") as raised,
        ):
            epoch_of(loader)
        assert raised.value.key == key
        assert raised.value.shard is not None
