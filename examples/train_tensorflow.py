"""Train a small convolutional network: Loader, QueueInput, StagingInput, and a training step.

    python examples/train_tensorflow.py            # on a miniature dataset
    python examples/train_tensorflow.py DATASET    # a folder with train/ and val/, as `prep convert` makes it

With --checkpoints FOLDER it continues where it was stopped: weights, optimizer and place in the data
together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tensorflow as tf
from sample_dataset import dataset_at

from shardprep import EvalTransform, Loader, LocalShuffle, QueueInput, StagingInput, TrainTransform

SIZE = 64


def network(classes: int) -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((SIZE, SIZE, 3), dtype="uint8"),
            layers.Rescaling(
                1 / 127.5, offset=-1.0
            ),  # on the device, so that bytes are transferred, not floats
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Conv2D(64, 3, strides=2, activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(classes),
        ]
    )


def train(path: Path, *, epochs: int, checkpoints: Path | None) -> None:
    train_loader = Loader(
        path / "train", batch_size=32, transform=TrainTransform(SIZE), shuffle=LocalShuffle("2GiB"), workers=2
    )
    val_loader = Loader(
        path / "val", batch_size=32, transform=EvalTransform(SIZE, resize=72), workers=1, drop_last=False
    )
    model = network(classes=len(train_loader.dataset.manifest.labels))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    with (
        train_loader,
        val_loader,
        StagingInput(QueueInput(train_loader)) as batches,  # on the device before the step needs it
        QueueInput(val_loader) as val_batches,
    ):

        @tf.function(input_signature=batches.element_spec)
        def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        # The last batch has fewer rows: the signature leaves their number open, to avoid a second trace.
        @tf.function(input_signature=val_batches.element_spec)
        def correct(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(tf.cast(tf.argmax(model(images), axis=1) == labels, tf.int64))

        place = tf.Variable("", dtype=tf.string)  # the loader's state, so that one file holds all or nothing
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, place=place)
        manager = checkpoints and tf.train.CheckpointManager(checkpoint, checkpoints, max_to_keep=1)
        if manager and manager.restore_or_initialize():
            batches.load_state_dict(json.loads(place.numpy()))

        for epoch in range(
            train_loader.epoch, epochs
        ):  # iterating raises errors and KeyboardInterrupt as usual
            losses = [step(images, labels) for images, labels in batches]
            hits = sum(int(correct(images, labels)) for images, labels in val_batches)
            count = len(val_loader.dataset)
            val_loader.receipt().check(count)  # each image once, for a correct accuracy
            print(f"epoch {epoch}: loss {tf.reduce_mean(losses):.3f}, val accuracy {hits / count:.3f}")
            if manager:  # may be done after any step: the state is that of the last batch taken
                place.assign(json.dumps(batches.state_dict()))
                manager.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, nargs="?")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoints", type=Path)
    args = parser.parse_args()
    tf.keras.utils.set_random_seed(0)
    with dataset_at(args.dataset) as path:
        train(path, epochs=args.epochs, checkpoints=args.checkpoints)


if __name__ == "__main__":  # workers import this file if a transform is defined in it
    main()
