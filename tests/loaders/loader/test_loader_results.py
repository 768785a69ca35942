"""The results of a transform that declares no outputs are stacked in the workers' memory, or sent."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import TransformInput, decode_rgb
from support.loaded import assert_same, epoch_of, loader_on

Rng = np.random.Generator


def parts(record: TransformInput, rng: Rng) -> Any:
    image = np.resize(decode_rgb(record.image), (16, 16, 3)) * np.float32(rng.random())
    return image, rng.random(), np.int16(record.label), record.label > 1


@pytest.mark.torture
def test_results_are_the_same_written_by_workers_sent_by_them_or_made_here(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_on(lmdb_shards, transform=parts) as loader:
        expected = epoch_of(loader)
    assert [part.dtype for part in expected[0]] == ["f4", "f8", "i2", "?", "i8", "i8"]
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert_same(epoch_of(loader), expected)
        with loader._batches(iter([(np.arange(10), 0)]), 0, loader._plan) as batches:
            for batch in batches:  # from the second batch on, no result is sent
                assert not batch.payloads
                assert [array.ctypes.data % 64 for array in batch.arrays.values()] == [0] * 4
        assert 0 < loader.engine.shared_bytes < 64 << 20  # of the rows that were written
    assert loader.engine.shared_bytes == 0

    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 40, 1 << 40))
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert loader.engine.layout.inputs == 0
        assert_same(epoch_of(loader), expected)
