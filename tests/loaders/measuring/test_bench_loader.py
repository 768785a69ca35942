"""``prep bench-loader`` and its output: figures that are consistent, of any size."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardprep.cli.commands.bench import sweep_lines
from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from shardprep.loaders.measuring import bench as loader_bench
from shardprep.loaders.measuring.bench import (
    CacheShares,
    LoaderBench,
    Sweep,
    SweepRun,
    bench,
    measure,
    probe,
    sweep,
)
from shardprep.loaders.measuring.progress_bar import watched
from support.column_datasets import write_columns
from support.datasets import converted, prep, prep_here
from support.disk_profiles import full_profile, names_in, paths_of, table
from support.loaded import assert_same, epoch_of
from support.loader_speeds import DECODING, speed_of
from support.repository import ROOT
from support.sampling import torture_except
from support.verdict_workers import Computing, Sleeping


@pytest.fixture(scope="module")
def dataset(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "train"
    converted(archives, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_a_loader_is_measured_over_as_many_epochs_as_it_takes(dataset: Path, workers: int) -> None:
    make = partial(
        Loader,
        dataset,
        batch_size=5,
        transform=TrainTransform(32),
        shuffle=LocalShuffle(10),
        workers=workers,
        drop_last=False,
    )

    speed = measure(make, seconds=0.3)

    assert speed.seconds >= 0.3
    assert speed.images > 24  # more than an epoch
    assert speed.images <= 5 * speed.batches
    assert speed.images_per_second > 0
    assert speed.gap_p50 <= speed.gap_p99
    assert set(speed.stages) == {"read", "decode", "augment"}
    assert speed.stages["decode"] > 0
    assert (speed.restarts, speed.skipped) == (0, 0)
    assert speed.verdict == speed.stats.verdict
    assert speed.verdict is not None
    assert speed.stats.rows == speed.images


@pytest.mark.slow
def test_cpu_memory_and_page_cache_are_measured(dataset: Path) -> None:
    make = partial(Loader, dataset, batch_size=8, transform=Computing(0.002), workers=1)
    for path in dataset.rglob("*.*"):  # the page cache may have let go of files of an earlier test
        if path.is_file():
            path.read_bytes()

    speed = measure(make, seconds=0.3)

    assert speed.cpu >= 0.9 * 0.002
    assert speed.main_cpu < speed.cpu
    assert speed.memory.ring >= 9 * 8 * 8  # slots of eight rows of eight bytes
    for peak in (speed.memory.main_peak, speed.memory.worker_peak):
        assert peak is not None
        assert peak > 10 << 20
    assert speed.page_cache == CacheShares(1.0, 1.0)


EPOCH = 24  # images in the dataset
MOST = partial(Loader, batch_size=EPOCH - 2, drop_last=False, workers=2)


@pytest.mark.torture
def test_the_figures_agree_where_a_batch_is_nearly_an_epoch(dataset: Path) -> None:
    speed = measure(partial(MOST, dataset, transform=Sleeping(0.004)), seconds=1)

    assert speed.verdict is not None
    assert speed.verdict.rate == pytest.approx(speed.images / speed.seconds)
    assert sum(load.utilisation for load in speed.stats.loads if load.place == "worker") < 1.2
    for load in speed.stats.loads:
        if load.place == "main":
            assert load.starved == pytest.approx(speed.starved)


@pytest.mark.torture
def test_only_the_first_batch_of_all_is_not_timed(dataset: Path) -> None:
    with MOST(dataset, transform=Sleeping(0.002)) as loader:
        epoch_of(loader)
        first = loader.stats()
        epoch_of(loader)
        second = loader.stats().since(first)

    assert (first.rows, first.timed) == (EPOCH, 2)
    assert (second.rows, second.timed, second.warming) == (EPOCH, EPOCH, 0)
    assert second.elapsed >= second.starved > 0.9 * (EPOCH - 2) / 2 * 0.002


@pytest.mark.torture
def test_too_short_a_run_is_told_and_has_no_verdict(dataset: Path) -> None:
    transform = Sleeping(0.002)
    make = partial(MOST, dataset, transform=transform)

    found = bench(make, transform, seconds=0.01, explain=True, disk=full_profile())
    lines = list(sweep_lines(Sweep("batch_size", (SweepRun(22, found.speed),))))

    assert (found.speed.verdict, found.probes, found.speed.to_json()["stats"]["verdict"]) == (
        None,
        None,
        None,
    )
    assert found.sentence.startswith("The run is too short to tell what limits it: ")
    assert found.sentence.endswith("fewer than 5 batches of 22; measure longer, or make batches smaller.")
    assert found.disk is not None
    assert "what limits it is not known" in found.disk.sentence
    assert "too short" in lines[1]
    assert "too short to tell which is fastest" in lines[2]


@pytest.mark.torture
def test_a_probe_that_is_too_short_says_nothing(dataset: Path) -> None:
    transform = Sleeping(0.0)
    make = partial(MOST, dataset, transform=transform)

    found = probe(make, speed_of(DECODING), transform, seconds=0.0)

    for run in found.runs:
        if run.name in ("encoded", "again"):
            assert (run.confirms, "the run is too short" in run.sentence) == (None, True)


def test_without_workers_there_is_no_memory_of_theirs(dataset: Path) -> None:
    speed = measure(partial(Loader, dataset, batch_size=8, workers=0), seconds=0.1)

    assert (speed.memory.ring, speed.memory.worker_peak, speed.memory.worker_own) == (0, None, None)
    assert speed.cpu == speed.main_cpu


@pytest.mark.torture
def test_a_sweep_finds_the_fastest(dataset: Path) -> None:
    make = partial(Loader, dataset, batch_size=8, transform=Sleeping(0.015))

    found = sweep(make, "workers", (1, 3), seconds=1)

    assert [run.value for run in found.runs] == [1, 3]
    assert found.fastest.value == 3
    assert found.to_json()["fastest"] == 3


def test_the_bar_of_a_sweep_is_as_long_as_its_rate() -> None:
    slow, fast = speed_of(DECODING), replace(speed_of(DECODING), images_per_second=200.0)

    lines = list(sweep_lines(Sweep("batch_size", (SweepRun(64, slow), SweepRun(128, fast)))))

    assert [line.count("█") + line.count("#") for line in lines[1:3]] == [20, 40]
    assert "batch-size" in lines[0]
    assert lines[3] == "Fastest with batch-size=128."


@pytest.fixture(scope="module")
def everything(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """The text and JSON that the command prints with all options, and the trace that it writes."""
    folder = tmp_path_factory.mktemp("everything")
    full_profile().save(folder / "disk.json")
    words = ["bench-loader", dataset, "--seconds", "0.2", "--batch-size", "4", "--size", "32", "--explain"]
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


@pytest.mark.torture
def test_all_that_was_asked_for_is_told_and_the_verdict_last(everything: tuple[str, Any, Any]) -> None:
    text, _, trace = everything

    for word in (
        "workers",
        "Fastest with",
        "images/s",
        "page cache",
        "µs/image",
        "hand-over",
        "without decoding",
        "neighbours that meet again",
    ):
        assert word in text
    assert "this disk reads 200 MB/s cold" in text
    assert re.match(r"[a-z -]+ limits, at [\d,]+ images/s: ", text.splitlines()[-1])
    assert {event["name"] for event in trace["traceEvents"]} >= {"waiting", "decode", "ready batches"}


def test_the_documented_keys_are_those_that_are_printed(everything: tuple[str, Any, Any]) -> None:
    _, figures, _ = everything

    assert documented_keys() == set(paths_of(figures))


@pytest.mark.slow
def test_what_was_not_asked_for_is_null(dataset: Path) -> None:
    asked = prep(
        "bench-loader",
        dataset,
        "--seconds",
        "0.1",
        "--transform",
        "none",
        "--shuffle",
        "global",
        "--json",
        check=True,
    )
    figures = json.loads(asked.stdout)

    assert [figures[name] for name in ("sweep", "probes", "disk", "shuffle_quality")] == [None] * 4
    assert figures["images"] > 0
    assert figures["bytes_per_second"] > figures["images_per_second"]


def documented_keys() -> set[str]:
    """The first column of the tables of bench-loader.md; the keys of a verdict wherever one is."""
    text = (ROOT / "docs" / "reference" / "bench-loader.md").read_text()
    objects, verdict = text.split("## `--json`")[1].split("A verdict:")
    inside = [name for line in table(verdict) for name in names_in(line)]
    found: set[str] = set()
    for line in table(objects):
        parts = inside if line.split("|")[2].strip() == "verdict" else [""]
        found |= {f"{name}.{part}".rstrip(".") for name in names_in(line) for part in parts}
    return found


@pytest.mark.torture
def test_without_explaining_the_verdict_is_last_as_well(dataset: Path) -> None:
    text = prep(
        "bench-loader", dataset, "--seconds", "0.1", "--batch-size", "4", "--workers", "1", check=True
    ).stdout

    assert " limits, at " in text.splitlines()[-1]
    assert "first batch" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shuffle", "much"], "much"),
        (["--sweep", "workers"], "such as workers=1,2,4"),
        (["--sweep", "batch-size=0"], "such as workers=1,2,4"),
        (["--sweep", "seed=1"], "workers, batch-size, slots"),
    ],
)
def test_options_that_cannot_be_meant_are_wrong_usage(dataset: Path, words: list[str], says: str) -> None:
    done = prep_here("bench-loader", dataset, *words)

    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_told_before_anything_is_measured(dataset: Path) -> None:
    done = prep("bench-loader", dataset, "--trace", dataset / "no" / "trace.json")

    assert done.returncode == 3
    assert "choose another path" in done.stderr


@pytest.mark.slow
def test_watching_a_loader_changes_nothing(dataset: Path) -> None:
    with Loader(dataset, batch_size=5, workers=1) as loader:
        plain = epoch_of(loader)
        loader.set_epoch(0)
        assert_same(plain, epoch_of(watched(loader)))


def test_columns_are_measured_without_a_transform(tmp_path: Path) -> None:
    write_columns(tmp_path / "d")
    words = ["--columns", "age,vector", "--seconds", "0.1", "--batch-size", "2", "--workers", "0", "--json"]

    done = prep_here("bench-loader", tmp_path / "d", *words)
    refused = prep_here("bench-loader", tmp_path / "d", "--columns", "depth")

    stages = json.loads(done.stdout)["stages"]
    assert stages["read"] > 0 == stages["augment"] == stages["decode"]
    assert refused.returncode == 2
    assert "depth" in refused.stderr


def test_records_without_images_are_measured_without_a_transform(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", image=None)

    done = prep_here(
        "bench-loader", tmp_path / "d", "--seconds", "0.1", "--batch-size", "2", "--workers", "0"
    )

    assert done.returncode == 0, done.stderr
