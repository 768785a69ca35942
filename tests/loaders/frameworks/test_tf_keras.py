"""Training with Keras: exact epochs and validation, known steps, occupancy in the logs, original errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Loader, TrainTransform
from shardprep.loaders.tf_inputs import Input, InputMonitor, QueueInput, original_errors
from support.loaded import loader_on
from support.loader_workers import OwnError
from support.tf_devices import tf
from support.tf_members import WHOLE, Made, Numbered, first, members


def model(loss: str = "sparse_categorical_crossentropy") -> Any:
    fitted = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(4, activation="softmax")])
    fitted.compile("sgd", loss)
    return fitted


@pytest.fixture(scope="module")
def train(lmdb_shards: Path) -> Iterator[Loader]:
    with loader_on(
        lmdb_shards, batch_size=40, workers=1, transform=TrainTransform(16), with_numbers=False, read_ahead=0
    ) as loader:
        yield loader


def fit(inputs: Input, callback: Any) -> Any:
    """Train for three epochs of six batches."""
    dataset = inputs.to_dataset().apply(tf.data.experimental.assert_cardinality(6))
    return model("mse").fit(dataset, epochs=3, shuffle=False, verbose=0, callbacks=[callback])


def with_targets(source: Numbered) -> Callable[[], Iterator[Any]]:
    return lambda: ((x, np.zeros((len(x), 4), np.float32)) for x, _ in source())


@members({name: WHOLE[name] for name in ("feed", "queue", "staging-over-queue", "dataset")}, quick=("queue",))
def test_an_error_within_fit_comes_as_itself(make: Made) -> None:
    def fail(step: int) -> None:
        if step == 3 and source.passes == 2:
            raise OwnError("at 3 of the second epoch")

    source = Numbered(before=fail)
    steps: list[int] = []
    note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    with (
        make(with_targets(source)) as inputs,
        pytest.raises(OwnError, match="second epoch") as caught,
        original_errors(),
    ):
        fit(inputs, note)

    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert steps == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_occupancy_is_written_where_tensorboard_reads_it(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    with QueueInput(with_targets(Numbered(last=3))) as inputs:
        history = fit(inputs, InputMonitor(writer=writer, queue=inputs)).history
    writer.close()

    found = scalars_in(tmp_path)
    assert found.keys() > {"queue/level", "queue/starved", "queue/blocked", "queue/batches_per_second"}
    for name in ("queue/level", "queue/starved", "queue/blocked"):
        assert [step for step, _ in found[name]] == [0, 1, 2]
        values = [value for _, value in found[name]]
        np.testing.assert_allclose(values, history[name], rtol=1e-6)
        assert all(0 <= value <= 2 for value in values)


def test_rate_and_stages_are_written_at_the_steps_of_resumed_training(tmp_path: Path, train: Loader) -> None:
    train.set_epoch(0)
    fitted, writer = model(), tf.summary.create_file_writer(str(tmp_path))
    steps: list[Any] = []
    note = tf.keras.callbacks.LambdaCallback(on_train_begin=lambda logs: steps.append(note.params["steps"]))
    with QueueInput(train) as inputs:
        first(inputs, 4)
        inputs.load_state_dict(inputs.state_dict())
        used = [InputMonitor(writer=writer, every=4, train=inputs), note]
        for rest in (len(inputs), None, None):  # each training goes on where the one before ended
            fitted.fit(inputs.to_dataset(), steps_per_epoch=rest, shuffle=False, verbose=0, callbacks=used)
        assert (inputs.stats().epochs, inputs.stats().batches) == (3, 3 * 6)
    writer.close()
    assert steps == [2, 6, 6]  # known before the first epoch

    found = scalars_in(tmp_path)
    assert {"train/stage/decode", "train/stage/hand-over", "train/stage/TensorFlow_queue"} < found.keys()
    assert [step for step, _ in found["train/images_per_second"]] == [6, 12]
    assert all(value > 0 for _, value in found["train/images_per_second"])
    assert all(0 <= value <= 1 for name in found if "/stage/" in name for _, value in found[name])
    assert found["train/stage/decode"][0][1] > 0


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars in a file of events, each with its step."""
    (file,) = folder.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            found.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return found
