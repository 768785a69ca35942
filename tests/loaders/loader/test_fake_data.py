"""FakeData: batches in the form of a loader's, without a dataset."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader
from shardprep.loaders.loader.fake import FakeData
from support.loaded import assert_same, epoch_of


@pytest.mark.slow
@pytest.mark.parametrize("encoded", [False, True])
def test_equal_arguments_make_equal_batches_in_every_iteration(encoded: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "size": (8, 8), "encoded": encoded}
    fake = FakeData(4, **options)
    first = epoch_of(fake)

    assert_same(first, epoch_of(fake))
    assert_same(first, epoch_of(FakeData(4, **options)))
    with pytest.raises(AssertionError):
        assert_same(first, epoch_of(FakeData(4, **options, seed=1)))


@pytest.mark.slow
def test_encoded_batches_are_described_as_a_loaders_are(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=6, workers=0) as loader:
        specs = loader.batch_specs
    fake = FakeData(1, batch_size=6, encoded=True)

    assert fake.batch_specs == specs
    with pytest.raises(UsageError, match="fixed size"):
        fake.batch_bytes  # noqa: B018


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"size": (0, 4)},
        {"seconds": -1.0},
        {"seconds": math.inf},
        {"seed": -1},
        {"batches": -1},
        {"classes": 0},
        {"seed": 1 << 64},
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be at least"):
        FakeData(**({"batches": 1, "batch_size": 1} | options))


def test_its_dataset_stands_in_the_place_of_one() -> None:
    with FakeData(4, batch_size=2, classes=3).dataset as records:
        assert records[-1].key == records.key(7)
        assert [record.key for record in records] == [records.key(number) for number in range(8)]
        with pytest.raises(IndexError, match="record 8 of 8"):
            records[8]
