"""The classes in a batch of a dataset that is stored class after class: the rule against measured orders."""

from __future__ import annotations

import numpy as np
import pytest

from shardprep.loaders.order.epoch_order import LocalShuffle, epoch_order
from shardprep.loaders.order.quality import ENOUGH, ClassMixing


def measured(mixing: ClassMixing, window: int) -> float:
    """The mean number of classes in a batch of an epoch."""
    records, rows = mixing.records, mixing.batch_size
    labels = np.arange(records) * mixing.classes // records
    full, rest = divmod(records, int(mixing.shard_records))
    shards = [int(mixing.shard_records)] * full + [rest] * bool(rest)
    order = epoch_order(shards, shuffle=LocalShuffle(window), seed=1, epoch=0)[:]
    batches = np.sort(labels[order[: records // rows * rows]].reshape(-1, rows), axis=1)
    return float((1 + np.count_nonzero(np.diff(batches, axis=1), axis=1)).mean())


MANY = [
    ClassMixing(100_000, 1_000, 3_000, 64),
    ClassMixing(60_000, 100, 5_000, 128),
    ClassMixing(60_000, 100, 60_000, 32),
    ClassMixing(100_000, 100, 250, 32),
    ClassMixing(60_000, 100, 60, 64),
]
FEW = [
    ClassMixing(5_000, 10, 1_000, 32),
    ClassMixing(50_000, 10, 2_000, 128),
    ClassMixing(24_000, 2, 5_000, 64),
]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("mixing", MANY, ids=str)
def test_the_classes_of_a_batch_are_as_measured(mixing: ClassMixing, share: float) -> None:
    window = int(share * mixing.records)
    most = mixing.per_batch(mixing.records)

    assert mixing.per_batch(window) / most == pytest.approx(measured(mixing, window) / most, abs=0.04)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("mixing", FEW, ids=str)
def test_of_few_classes_a_batch_has_no_fewer_than_said(mixing: ClassMixing, share: float) -> None:
    window = int(share * mixing.records)

    assert mixing.per_batch(window) <= measured(mixing, window) + 0.05


@pytest.mark.parametrize("mixing", [*MANY, *FEW], ids=str)
def test_the_least_window_suffices_as_measured(mixing: ClassMixing) -> None:
    least = mixing.least_window()
    if least is None:
        assert not mixing.suffices(mixing.records // 2)
    else:
        assert mixing.suffices(least)
        assert not mixing.suffices(least - 1)
        assert measured(mixing, least) > (ENOUGH - 0.03) * measured(mixing, mixing.records)


def test_imagenet_in_batches_of_32_wants_a_window_of_a_seventh_and_in_batches_of_256_a_global_shuffle() -> (
    None
):
    assert ClassMixing(1_281_167, 1_000, 9_000, 32).least_window() == pytest.approx(1_281_167 / 7, rel=0.1)
    assert ClassMixing(1_281_167, 1_000, 9_000, 256).least_window() is None


@pytest.mark.parametrize(
    ("mixing", "window"),
    [
        (ClassMixing(300, 1, 30, 8), 1),
        (ClassMixing(300, 10, 30, 1), 1),
        (ClassMixing(300, 10, 30, 8), 300),
    ],
    ids=["one class", "batches of one", "a window of all"],
)
def test_a_window_that_takes_no_classes_away_suffices(mixing: ClassMixing, window: int) -> None:
    assert mixing.suffices(window)
