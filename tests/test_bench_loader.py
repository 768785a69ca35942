"""``prep bench-loader`` and what it prints: figures that hang together, never how large they are."""

import json
from functools import partial
from pathlib import Path

import pytest
from datasets import converted, prep

from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from shardprep.loaders.measure import measure, window_rates


@pytest.fixture(scope="module")
def dataset(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "train"
    converted(archives, folder)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
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


def test_every_window_counts_the_images_after_its_beginning() -> None:
    arrivals = [(0.0, 9), (1.0, 10), (1.5, 10), (3.0, 20), (3.5, 7)]

    assert window_rates(arrivals, 1.0) == [10.0, 15.0]


def test_the_command_tells_people_and_machines_what_it_measured(dataset: Path) -> None:
    words = ["bench-loader", dataset, "--seconds", "0.2", "--batch-size", "8", "--workers", "1"]

    text = prep(*words, "--size", "32", check=True).stdout
    asked = prep(*words, "--transform", "none", "--shuffle", "global", "--json", check=True)
    figures = json.loads(asked.stdout)

    assert "images/s" in text
    assert "MB/s" in text or "KB/s" in text
    assert "decode" in text
    assert "first batch" in text
    assert figures["images"] > 0
    assert figures["bytes_per_second"] > figures["images_per_second"]


def test_a_window_without_a_number_is_wrong_usage(dataset: Path) -> None:
    done = prep("bench-loader", dataset, "--shuffle", "much")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
