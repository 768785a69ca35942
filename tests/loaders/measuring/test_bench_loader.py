"""``prep bench-loader``, its output, its probes and its verdict: figures that are consistent, of any size."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.cli.commands.bench import sweep_lines
from shardprep.loaders import Loader, LoaderStats
from shardprep.loaders.loader.ahead import StorageCounts
from shardprep.loaders.loader.stats import STEP
from shardprep.loaders.measuring import bench as loader_bench
from shardprep.loaders.measuring.bench import (
    CacheShares,
    DiskComparison,
    LoaderBench,
    LoaderSpeed,
    MemoryUse,
    Probe,
    Probes,
    Sweep,
    bench,
    judge_encoded,
    judge_one_core,
    judge_repetition,
    measure,
    probe,
)
from support.column_datasets import write_columns
from support.datasets import converted, prep_here
from support.disk_profiles import documented_paths, full_profile, paths_of
from support.verdict_workers import Computing, Sleeping

DECODING = {"read": 1.0, "decode": 16.0, "augment": 2.0}
READING = {"read": 18.0, "decode": 1.0, "augment": 0.5}


def stats_of(**changes: Any) -> LoaderStats:
    """A thousand images of 100 KB in ten seconds, by two workers on two CPUs that decode all the time."""
    whole = LoaderStats(
        rows=1000, timed=1000, batches=10, elapsed=10.0, starved=9.5, handing=0.1, filling=(10.0, 10.0),
        waiting=(0.0, 0.0), cpu=(19.0,), queued=(0.5,), stages=DECODING, image_bytes=1e5, crop_ready=1.0,
        **dict.fromkeys(["workers", "cpus"], 2),
        **dict.fromkeys(["warming", "blocked", "copied", "restarts"], 0),
    )  # fmt: skip
    return replace(whole, **changes)


def speed_of(stages: dict[str, float], *, cached: float | None = 1.0) -> LoaderSpeed:
    """The speed of such a run, with workers that are always busy with ``stages``."""
    busy = {"cpu": (9.5, 9.5), "queued": (0.0, 0.0), "starved": 9.8}
    stats = stats_of(batches=100, stages=stages, crop_ready=0, **busy)
    return LoaderSpeed(
        images=1000, batches=100, batch_size=10, seconds=10.0, first_batch=0.5, images_per_second=100.0,
        bytes_per_second=1e7, gap_p50=0.1, gap_p99=0.2, decoder=None,
        stages={name: seconds / 1000 for name, seconds in stages.items()}, starved=0.98, cpu=0.02,
        main_cpu=0.0001, memory=MemoryUse(0, None, None, None), page_cache=CacheShares(cached, cached),
        stats=stats, **dict.fromkeys(["idle", "blocked", "skipped", "restarts"], 0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def dataset(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "train"
    converted(archives, folder)
    return folder


EPOCH = 24  # images in the dataset


@pytest.mark.torture
def test_too_short_a_run_is_told_and_has_no_verdict(dataset: Path) -> None:
    transform = Sleeping(0.002)
    make = partial(Loader, dataset, batch_size=EPOCH - 2, drop_last=False, workers=2, transform=transform)

    found = bench(make, transform, seconds=0.01, explain=True, disk=full_profile())
    lines = list(sweep_lines(Sweep("batch_size", ((22, found.speed),))))

    assert found.speed.verdict is found.probes is found.speed.to_json()["stats"]["verdict"] is None
    told = found.speed.sentence
    assert told.startswith("The run is too short to tell what limits it: ")
    assert told.endswith("fewer than 5 batches of 22; measure longer, or make batches smaller.")
    assert found.disk is not None
    assert "its bottleneck is unknown" in found.disk.sentence
    assert "too short" in lines[1]
    assert "too short to tell which is fastest" in lines[2]


@pytest.fixture(scope="module")
def everything(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """The text and JSON that the command prints with all options, and the trace that it writes."""
    folder = tmp_path_factory.mktemp("everything")
    full_profile().save(folder / "disk.json")
    words = ["bench-loader", dataset, "--seconds", "0.5", "--batch-size", "4", "--size", "32", "--explain"]
    words += ["--sweep", "workers=1,2", "--disk", folder / "disk.json", "--trace", folder / "trace.json"]
    words += ["--shuffle-quality"]
    found: list[LoaderBench] = []

    def once(*args: Any, **options: Any) -> LoaderBench:
        found.extend([] if found else [bench(*args, **options)])
        return found[0]

    with pytest.MonkeyPatch.context() as patch:  # values measured once are printed twice
        patch.setattr(loader_bench, "bench", once)
        text = prep_here(*words).stdout
        figures = json.loads(prep_here(*words, "--json").stdout)
    return text, figures, json.loads((folder / "trace.json").read_text())


def test_the_documented_keys_are_those_that_are_printed(everything: tuple[str, Any, Any]) -> None:
    _, figures, _ = everything

    too_short = {"sweep.runs[].verdict"}  # null, on a busy machine
    assert documented_paths("bench-loader", "verdict") == set(paths_of(figures)) - too_short


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shuffle", "much"], "much"),
        (["--sweep", "workers"], "such as workers=1,2,4"),
        (["--sweep", "batch-size=0"], "batch-size from 1 or slots from 3"),
        (["--sweep", "seed=1"], "workers from 0"),
    ],
)
def test_options_that_cannot_be_meant_are_wrong_usage(dataset: Path, words: list[str], says: str) -> None:
    done = prep_here("bench-loader", dataset, *words)

    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_columns_are_measured_without_a_transform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_columns(tmp_path / "d")
    checked = list[str]()  # for pages in memory
    monkeypatch.setattr(loader_bench, "resident_share", lambda path: checked.append(path.name) or 0.0)
    words = ["--columns", "age,vector,caption", "--seconds", "0.1", "--workers", "0", "--json"]

    done = prep_here("bench-loader", tmp_path / "d", "--batch-size", "2", *words)
    refused = prep_here("bench-loader", tmp_path / "d", "--columns", "depth")

    stages = json.loads(done.stdout)["stages"]
    assert stages["read"] > 0 == stages["augment"] == stages["decode"]
    assert {name.partition("-0")[0] for name in checked} == {"column-caption"}
    assert (refused.returncode, "depth" in refused.stderr) == (2, True)


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


@pytest.mark.parametrize(
    ("runs", "confirmed"), [([], None), ([None], None), ([None, True], True), ([True, False], False)]
)
def test_probes_that_tell_nothing_do_not_count(runs: list[bool | None], confirmed: bool | None) -> None:
    assert Probes("decode", tuple(Probe("again", 1.0, "", each) for each in runs)).confirmed is confirmed


def test_without_a_transform_there_is_less_to_leave_out(lmdb_shards: Path) -> None:
    make = partial(Loader, lmdb_shards, batch_size=10, workers=0)

    probes = probe(make, measure(make, seconds=0.1), None, seconds=0.1)

    assert [run.name for run in probes.runs] == ["hand-over", "again"]
    assert probes.runs[1].confirms is None


@pytest.mark.parametrize(
    ("judge", "stages", "rates"),
    [
        (judge_one_core, DECODING, {55.0: True, 500.0: False}),
        (judge_one_core, READING, {500.0: True, 55.0: False}),
        (judge_encoded, DECODING, {500.0: True, 110.0: False}),
        (judge_encoded, READING, {500.0: False, 110.0: True}),
        (judge_encoded, {"read": 15.0, "decode": 4.0}, {500.0: None, 110.0: None}),
    ],
)
def test_a_run_confirms_a_verdict_that_foretells_its_rate(judge: Any, stages: Any, rates: Any) -> None:
    for rate, confirms in rates.items():
        found = judge(speed_of(stages), rate)
        assert found.confirms is confirms
        assert (f"2 could make {2 * rate:,.0f}" in found.sentence) is (judge is judge_one_core)


@pytest.mark.parametrize(
    ("before", "then", "says"),
    [
        (0.0, 1.0, "so the storage is slower"),
        (1.0, 1.0, "the storage was not read"),
        *((*shares, "not all shards are in memory") for shares in ((0.0, 0.2), (None, None))),
    ],
)
def test_the_page_cache_tells_what_the_second_reading_was(before: Any, then: Any, says: str) -> None:
    first, second = (speed_of(READING, cached=share) for share in (before, then))
    faster = LoaderSpeed(**{**vars(second), "images_per_second": 300.0})

    assert says in judge_repetition(first, faster).sentence


@pytest.mark.parametrize(
    ("limit", "cold", "says"),
    [
        ("read", 260e6, "Disk-bound at 245 MB/s; this disk reads 260 MB/s cold."),
        ("read", 2600e6, "but this disk reads 2,600 MB/s cold"),
        ("decode", 2600e6, "Not disk-bound: the loader delivers 245 MB/s; this disk reads 2,600 MB/s cold"),
        ("decode", 100e6, "which would limit a cold epoch"),
        ("read", None, "from this disk is unknown"),
    ],
)
def test_a_disk_is_what_limits_only_where_reading_does(limit: str, cold: float | None, says: str) -> None:
    found = DiskComparison(245e6, cold, 4e9, limit)

    assert says in found.sentence
    assert found.to_json()["sentence"] == found.sentence


SECONDS = st.just(0.0) | st.floats(1e-6, 1e4)


@st.composite
def times(draw: st.DrawFn) -> LoaderStats:
    """Any times that clocks can show: they need not be consistent."""
    timed = draw(st.integers(0, 10**6))
    return stats_of(
        rows=timed + draw(st.integers(0, 10**4)),
        timed=timed,
        image_bytes=draw(st.floats(0, 1e6)),
        workers=draw(st.integers(0, 64)),
        cpus=draw(st.integers(1, 64)),
        stages={name: draw(SECONDS) for name in ("read", "decode", "augment")},
        storage=StorageCounts(waited=draw(SECONDS)),
        **{name: (draw(SECONDS),) for name in ("filling", "cpu", "queued")},
        **{name: draw(SECONDS) for name in ("elapsed", "blocked", "starved", "handing")},
    )


@given(stats=times())
def test_every_verdict_is_a_sentence_with_the_limit_and_plain_json(stats: LoaderStats) -> None:
    verdict = stats.verdict

    assert (verdict is None) == (not stats.timed or not stats.elapsed)
    if verdict:
        assert str(verdict) == str(stats)
        assert str(verdict).startswith(f"{verdict.limit} limits, at ")
        assert "inf" not in str(verdict)
        assert "nan" not in str(verdict)
        assert verdict.next_rate >= verdict.rate
        told = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
        assert told["sentence"] == str(verdict)
        assert told["next_rate"] == (verdict.next_rate if math.isfinite(verdict.next_rate) else None)


@pytest.mark.parametrize(
    ("changes", "limit", "says"),
    [
        ({}, "decode", "all CPUs (2) are in use, so more workers do not help"),
        ({"cpus": 8}, "decode", "more workers help: 8 instead of 2 would reach about 400 images/s"),
        ({"cpu": (9.0,), "queued": (10.0,)}, "decode", "wait for a CPU 53% of the time"),
        ({"stages": READING, "cpu": (2.0,), "queued": (0.1,)}, "read", "the storage delivers 10 MB/s"),
        ({"starved": 0.2}, STEP, "a faster loader would gain nothing"),
        ({"starved": 0.2, "handing": 9.0}, "hand-over", "make batches larger"),
        (
            {"starved": 3.0, "storage": StorageCounts(waited=6.0)},
            "storage",
            "downloads 60% of the time; a faster link",
        ),
        ({"starved": 7.0, "storage": StorageCounts(waited=2.0)}, "decode", "more workers do not help"),
        ({"starved": 0.1, "storage": StorageCounts(waited=0.5)}, STEP, "a faster loader would gain nothing"),
        ({"workers": 0, "filling": (9.5,)}, "decode", "set workers to 1 or more"),
        (
            {"cpu": (10.0,), "queued": (1.0,)},
            "decode",
            "more workers help: 3 instead of 2 would reach about 150",
        ),
        ({"cpu": (4.0,), "queued": (9.0,)}, "decode", "wait for a CPU 69% of the time"),
        ({"cpu": (3.0,)}, "decode", "the workers wait in this stage instead of computing; more workers help"),
        ({"stages": {"read": 1.0, "decode": 2.0, "augment": 1.0}}, "transport", "more workers do not help"),
    ],
)
def test_the_figures_lead_to_the_advice(changes: dict[str, Any], limit: str, says: str) -> None:
    verdict = stats_of(**changes).verdict

    assert verdict is not None
    assert (verdict.limit, says in verdict.advice) == (limit, True), str(verdict)
