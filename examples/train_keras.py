"""Training with Keras: ``model.fit`` over two loaders, and how often it had to wait for them.

python examples/train_keras.py [DATASET]
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf
from sample_dataset import dataset_at
from train_tensorflow import SIZE, network

from shardprep import EvalTransform, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.tf_inputs import InputMonitor, QueueInput, original_errors


def train(path: Path) -> None:
    train_transform, val_transform = TrainTransform(SIZE), EvalTransform(SIZE, resize=72)
    with (
        Loader(
            path / "train", batch_size=32, transform=train_transform, shuffle=LocalShuffle("2GiB")
        ) as loader,
        Loader(path / "val", batch_size=32, transform=val_transform, drop_last=False) as val_loader,
        QueueInput(loader) as batches,
        QueueInput(val_loader) as val_batches,
    ):
        model = network(classes=len(loader.dataset.manifest.labels))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
        with original_errors():  # otherwise a damaged shard is reported as TensorFlow's UnknownError
            history = model.fit(
                batches.to_dataset(),
                validation_data=val_batches.to_dataset(),
                epochs=6,
                shuffle=False,  # the loader shuffles
                callbacks=[InputMonitor(train=batches)],
                verbose=2,
            )
        val_loader.receipt().check(len(val_loader.dataset))  # the last validation saw each image once
        print(f"share of steps that waited: {history.history['train/starved'][-1]:.2f}")


if __name__ == "__main__":  # workers import this file if a transform is defined in it
    tf.keras.utils.set_random_seed(0)
    with dataset_at(Path(sys.argv[1]) if sys.argv[1:] else None) as found:
        train(found)
