"""A flow from a dataset at a URL has the items of the local copy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import read_manifest
from shardprep.formats.runtime.owned import running_ends
from shardprep.loaders import Flow, LocalShuffle
from support.column_datasets import write_columns
from support.waiting import until


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.torture)])
def test_a_flow_reads_through_a_cache_that_is_smaller_than_the_dataset(
    lmdb_shards: Path, tmp_path: Path, processes: int
) -> None:
    limit = read_manifest(lmdb_shards).size * 6 // 10
    options = {"shuffle": LocalShuffle(30), "seed": 5}

    def items(**where: Any) -> list[tuple[Any, ...]]:
        flow = Flow.from_dataset(**where, **options)
        return list(flow.map(len_of, processes=processes) if processes else flow)

    expected = items(path=lmdb_shards)
    found = items(path=lmdb_shards.as_uri(), cache=tmp_path / "c", cache_limit=limit)
    assert found == expected
    files = (tmp_path / "c" / "files").rglob("*")
    assert sum(path.stat().st_size for path in files if path.is_file()) <= limit
    until(lambda: not running_ends())  # of the flow, which nothing closes
    assert not list((tmp_path / "c" / "readers").iterdir())


def len_of(item: tuple[Any, ...]) -> tuple[int, int]:
    return len(item[0]), item[1]


def test_columns_come_through_the_cache(tmp_path: Path) -> None:
    write_columns(tmp_path / "columns")
    url = (tmp_path / "columns").as_uri()
    np.testing.assert_equal(
        list(Flow.from_dataset(url, cache=tmp_path / "c")), list(Flow.from_dataset(tmp_path / "columns"))
    )
