"""Columns of every kind reach the batches, the same for any workers and after a restart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Loader, LocalShuffle
from support.column_datasets import write_columns
from support.loaded import assert_same, epoch_of

RECORDS = 24


def every_value(record: Any, rng: np.random.Generator) -> Any:
    """The encoded image, mask and texts by their sums, a random box, and numbers as they are."""
    texts = record["caption"].encode() + json.dumps(record["about"]).encode()
    encoded = [record.image, record["mask"], record["sound"], texts]
    box = rng.permutation([*record["boxes"], np.full(4, -1, np.float32)])[0]
    numbers = [record["age"], record["score"], record["colour"], *map(int, record["tags"][:1])]
    sums = np.array([np.frombuffer(data, np.uint8).sum(dtype=np.int64) for data in encoded])
    return sums, box, record["vector"], np.resize(np.array(numbers, np.float64), 4)


@pytest.mark.slow
def test_batches_are_the_same_for_any_workers_and_after_a_restart(tmp_path: Path) -> None:
    write_columns(tmp_path, RECORDS)
    options: dict[str, Any] = {"batch_size": 5, "transform": every_value, "shuffle": LocalShuffle(12)}
    with Loader(tmp_path, workers=0, drop_last=False, **options) as loader:
        expected = epoch_of(loader)
    with Loader(tmp_path, workers=2, drop_last=False, **options) as loader:
        batches = iter(loader)
        np.testing.assert_equal([next(batches), next(batches)], expected[:2])
        state = json.dumps(loader.state_dict())
    with Loader(tmp_path, workers=1, drop_last=False, **options) as loader:
        loader.load_state_dict(json.loads(state))
        assert_same(epoch_of(loader), expected[2:])
        loader.receipt().check(RECORDS)
    assert [part.shape[1:] for part in expected[0][:-1]] == [(4,), (4,), (3,), (4,)]
