"""Training with Keras: exact epochs and validation, known steps, occupancy in the logs, original errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import EvalTransform, Loader, TrainTransform
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    FeedInput,
    Input,
    InputMonitor,
    QueueInput,
    StagingInput,
    original_errors,
    to_dataset,
)
from support.datasets import converted
from support.loaded import loader_on
from support.loader_workers import OwnError
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import Numbered

MAKERS: dict[str, Callable[[Any], Input]] = {
    "feed": FeedInput,
    "queue": QueueInput,
    "staging": lambda source: StagingInput(QueueInput(source), depth=2),
    "dataset": lambda source: DatasetInput(to_dataset(source)),
}


class Counting(tf.keras.Model):
    """A model that trains, and records the labels that it gets, within the compiled step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = tf.keras.layers.Dense(4)
        self.seen: dict[str, list[int]] = {"train": [], "test": []}

    def call(self, images: Any) -> Any:
        return self.dense(tf.reduce_mean(tf.cast(images, tf.float32), axis=(1, 2)) / 255.0)

    def train_step(self, data: Any) -> Any:
        self._note("train", data[1])
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self._note("test", data[1])
        return super().test_step(data)

    def _note(self, kind: str, labels: Any) -> None:
        tf.numpy_function(lambda values: self.seen[kind].extend(values.tolist()), [labels], [])


def model() -> Counting:
    made = Counting()
    made.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


@pytest.fixture(scope="module")
def val_shards(lmdb_shards: Path) -> Path:
    converted(lmdb_shards.parent / "archives", lmdb_shards.parent / "val", split="val")
    return lmdb_shards.parent / "val"


@pytest.fixture(scope="module")
def train(lmdb_shards: Path) -> Iterator[Loader]:
    with loader_on(
        lmdb_shards, batch_size=40, workers=1, transform=TrainTransform(16), with_numbers=False
    ) as loader:
        yield loader


@pytest.fixture(scope="module")
def validate(val_shards: Path) -> Iterator[Loader]:
    with Loader(
        val_shards, batch_size=4, transform=EvalTransform(16, resize=18), workers=0, drop_last=False
    ) as loader:
        yield loader


def labels_of(loader: Loader) -> list[int]:
    return sorted(int(loader.dataset[number].label) for number in range(len(loader.dataset)))


def test_steps_are_known_before_the_first_epoch(train: Loader) -> None:
    train.set_epoch(0)
    steps: list[Any] = []

    class Note(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            steps.append(self.params["steps"])

    with QueueInput(train) as inputs:
        model().fit(inputs.to_dataset(), epochs=1, shuffle=False, verbose=0, callbacks=[Note()])

    assert steps == [6]


@pytest.mark.torture
def test_a_strategy_trains_on_every_sample(train: Loader, validate: Loader) -> None:
    train.set_epoch(0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        fitted = model()
    with QueueInput(train) as inputs, QueueInput(validate) as held_out:
        fitted.fit(
            inputs.to_dataset(), validation_data=held_out.to_dataset(), epochs=2, shuffle=False, verbose=0
        )

    assert sorted(fitted.seen["train"]) == sorted(labels_of(train) * 2)
    assert sorted(fitted.seen["test"]) == sorted(labels_of(validate) * 2)


@pytest.mark.parametrize("make", torture_except(MAKERS.values(), MAKERS["queue"]), ids=MAKERS.keys())
def test_an_error_within_fit_comes_as_itself(make: Callable[[Any], Input]) -> None:
    def fail(step: int) -> None:
        if step == 3 and source.passes == 2:
            raise OwnError("at 3 of the second epoch")

    source = Numbered(before=fail)
    fitted = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    fitted.compile("sgd", "mse")
    steps: list[int] = []
    note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    with (
        make(lambda: ((x, x[:, :1]) for x, _ in source())) as inputs,
        pytest.raises(OwnError, match="second epoch") as caught,
        original_errors(),
    ):
        fitted.fit(
            inputs.to_dataset().apply(tf.data.experimental.assert_cardinality(6)),
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[note],
        )

    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert steps == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_occupancy_is_written_where_tensorboard_reads_it(tmp_path: Path) -> None:
    source = Numbered(last=3)
    fitted = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    fitted.compile("sgd", "mse")
    writer = tf.summary.create_file_writer(str(tmp_path))
    with QueueInput(lambda: ((x, x[:, :1]) for x, _ in source())) as inputs:
        history = fitted.fit(
            inputs.to_dataset().apply(tf.data.experimental.assert_cardinality(6)),
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[InputMonitor(writer=writer, queue=inputs)],
        ).history
    writer.close()

    found = scalars_in(tmp_path)
    assert found.keys() > {"queue/level", "queue/starved", "queue/blocked", "queue/batches_per_second"}
    for name in ("queue/level", "queue/starved", "queue/blocked"):
        assert [step for step, _ in found[name]] == [0, 1, 2]
        values = [value for _, value in found[name]]
        np.testing.assert_allclose(values, history[name], rtol=1e-6)
        assert all(0 <= value <= 2 for value in values)


def test_rate_and_stages_are_written_at_the_steps_of_the_training(tmp_path: Path, train: Loader) -> None:
    train.set_epoch(0)
    fitted, writer = model(), tf.summary.create_file_writer(str(tmp_path))
    with QueueInput(train) as inputs:
        monitor = InputMonitor(writer=writer, every=4, train=inputs)
        for _ in range(2):  # the second training goes on where the first one ended
            fitted.fit(inputs.to_dataset(), shuffle=False, verbose=0, callbacks=[monitor])
    writer.close()

    found = scalars_in(tmp_path)
    assert {"train/stage/decode", "train/stage/hand-over", "train/stage/TensorFlow_queue"} < found.keys()
    assert [step for step, _ in found["train/images_per_second"]] == [4, 10]
    assert all(value > 0 for _, value in found["train/images_per_second"])
    assert all(0 <= value <= 1 for name in found if "/stage/" in name for _, value in found[name])
    assert found["train/stage/decode"][0][1] > 0


def test_scalars_of_steps_need_a_writer() -> None:
    with pytest.raises(UsageError, match="a writer"):
        InputMonitor(every=10)


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars in a file of events, each with its step."""
    (file,) = folder.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            found.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return found
