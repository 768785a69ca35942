"""What a training loop needs of a Loader, and of FakeData in its place; and each of them alone."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import FakeData, Loader, RunCard, TrainTransform
from shardprep.loaders.measuring import watched
from support.loaded import assert_same, epoch_of
from support.remote_ends import wired
from support.sampling import torture_except

Make = Callable[..., Any]


@pytest.fixture
def make_loader(lmdb_shards: Path) -> Make:
    """Make a Loader of 8 batches of 20 records; the dataset has 204."""
    options: dict[str, Any] = {"transform": TrainTransform(8), "workers": 0, "rank": 0, "world_size": 1}
    return partial(Loader, lmdb_shards, records=range(165), batch_size=20, **options)


@pytest.fixture(params=["Loader", "FakeData"])
def make(request: pytest.FixtureRequest, make_loader: Make) -> Make:
    if request.param == "Loader":
        return make_loader
    return lambda: FakeData(8, batch_size=20, size=np.array([8, 8]), classes=4)


def test_a_step_is_replayed_shown_and_compared(make_loader: Make) -> None:
    with make_loader() as source, make_loader() as again, make_loader(seed=1) as other:
        batches = epoch_of(source)
        for step, start in ((6, 0), (4, 40)):
            replayed = source.replay(0, step, start=start)
            assert_same([replayed.batch], [batches[6]])
            assert replayed.labels.tolist() == batches[6][1].tolist()
            assert replayed.keys == [source.key(number) for number in replayed.numbers]
        shown = source.show_batch(3, 6, most=2)
        assert (len(shown.images), "step 6 of epoch 3" in repr(shown)) == (2, True)
        assert replayed.keys[0] in repr(shown)
        assert source.dataset.classes[replayed.labels[0]] in repr(shown)
        with pytest.raises(IndexError):
            source.replay(0, 8)

        assert RunCard.from_json(source.card().to_json()) == again.card()
        assert source.parting(again, range(3)) is None
        assert source.parting(other).kind == "augmentation"


@pytest.mark.parametrize("steps", torture_except([0, 1, 5, 8], 8))
def test_a_state_goes_on_after_the_last_batch(make: Make, steps: int) -> None:
    with make() as source:
        whole, again = epoch_of(source), epoch_of(source)
        receipt = source.receipt() if isinstance(source, Loader) else None
    with make() as source:
        source.set_epoch(np.int64(1))
        done = len(epoch_of(source, max(1, steps)))
        state = json.loads(json.dumps(source.state_dict()))
    with make() as source:
        source.load_state_dict(state)
        assert (source.epoch, len(source)) == ((1, 8 - done) if done < 8 else (2, 8))
        iter(source)  # as Lightning does, to see whether it can be iterated
        assert (source.epoch, len(source)) == (1 if done < 8 else 2, 8)
        if done < 8:
            assert_same(epoch_of(source), again[done:])
            assert not receipt or source.receipt() == receipt
            assert len(source) == len(whole)


def test_the_dataset_has_records_and_classes(make_loader: Make) -> None:
    with make_loader() as source:
        dataset = source.dataset
        assert len(dataset.classes) == 4
        assert sorted(dataset.classes) == list(dataset.classes)
        record = dataset[5]
        assert record.key == source.key(5)
        assert 0 <= record.label < 4
        assert next(iter(dataset)) == dataset[0] == dataset[-len(dataset)]
        keys = [record.key for record in dataset][: len(source.records)]
        assert keys == [source.key(number) for number in range(len(keys))]
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_it_is_served_and_watched(make: Make) -> None:
    with make() as source:
        whole = epoch_of(source)
        assert sum(1 for _ in watched(source)) == 8
        with pytest.raises(UsageError, match="not enumerate"):
            next(watched(enumerate(source)))
    with wired(make) as remote:
        assert_same(epoch_of((images, labels) for images, labels in remote), whole)
        receipt = remote.receipt()
        receipt.check(165 if isinstance(source, Loader) else 8, left_out=receipt.left_out.count)


# FakeData alone


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
    assert_same(first, epoch_of(pickle.loads(pickle.dumps(fake))))  # noqa: S301
    assert len(pickle.dumps(fake)) < 500


@pytest.mark.slow
def test_encoded_batches_are_described_as_a_loaders_are(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=6, workers=0) as loader:
        assert FakeData(1, batch_size=6, encoded=True).batch_specs == loader.batch_specs
