"""Probes: the parts that they leave out, and the conclusions from the rates of the rest."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from shardprep.loaders import Loader
from shardprep.loaders.measuring.bench import (
    AgainstDisk,
    LoaderSpeed,
    measure,
    once_more,
    one_core,
    probe,
)
from support.loader_speeds import DECODING, READING, speed_of
from support.verdict_workers import Computing


@pytest.mark.torture
def test_a_slow_transform_is_confirmed_by_runs_without_it(lmdb_shards: Path) -> None:
    transform = Computing(0.005)
    make = partial(Loader, lmdb_shards, batch_size=2, transform=transform, workers=1)
    speed = measure(make, seconds=0.3)

    probes = probe(make, speed, transform, seconds=0.2)

    assert probes.limit == "augment"
    assert [run.name for run in probes.runs] == ["hand-over", "encoded", "again", "one core"]
    found = {run.name: run for run in probes.runs}
    assert found["encoded"].images_per_second > 2 * speed.images_per_second
    assert found["hand-over"].images_per_second > 2 * speed.images_per_second
    assert (found["encoded"].confirms, found["hand-over"].confirms) == (True, True)
    assert json.loads(json.dumps(probes.to_json()))["confirmed"] is probes.confirmed


def test_without_a_transform_there_is_less_to_leave_out(lmdb_shards: Path) -> None:
    make = partial(Loader, lmdb_shards, batch_size=10, workers=0)

    probes = probe(make, measure(make, seconds=0.1), None, seconds=0.1)

    assert [run.name for run in probes.runs] == ["hand-over", "again"]
    assert probes.runs[1].confirms is None


@pytest.mark.parametrize(
    ("stages", "rate", "confirms"),
    [(DECODING, 55.0, True), (DECODING, 500.0, False), (READING, 500.0, True), (READING, 55.0, False)],
)
def test_a_core_that_decodes_tells_whether_the_workers_do(
    stages: dict[str, float], rate: float, confirms: bool
) -> None:
    found = one_core(speed_of(stages), rate)

    assert found.confirms is confirms
    assert f"2 could make {2 * rate:,.0f}" in found.sentence


@pytest.mark.parametrize(
    ("before", "then", "says"),
    [
        (0.0, 1.0, "so the storage takes the time"),
        (1.0, 1.0, "the storage was not read"),
        (0.0, 0.2, "not all shards are in memory"),
        (None, None, "not all shards are in memory"),
    ],
)
def test_the_page_cache_tells_what_the_second_reading_was(
    before: float | None, then: float | None, says: str
) -> None:
    first, second = (speed_of(READING, cached=share) for share in (before, then))
    faster = LoaderSpeed(**{**vars(second), "images_per_second": 300.0})

    assert says in once_more(first, faster).sentence


@pytest.mark.parametrize(
    ("limit", "cold", "says"),
    [
        ("read", 260e6, "Disk-bound at 245 MB/s; this disk reads 260 MB/s cold."),
        ("read", 2600e6, "but this disk reads 2,600 MB/s cold"),
        ("decode", 2600e6, "Not disk-bound: the loader delivers 245 MB/s; this disk reads 2,600 MB/s cold"),
        ("decode", 100e6, "which would limit a cold epoch"),
        ("read", None, "from this disk is not known"),
    ],
)
def test_a_disk_is_what_limits_only_where_reading_does(limit: str, cold: float | None, says: str) -> None:
    found = AgainstDisk(245e6, cold, 4e9, limit)

    assert says in found.sentence
    assert found.to_json()["sentence"] == found.sentence
