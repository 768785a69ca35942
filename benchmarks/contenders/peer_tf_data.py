"""tf.data at its fastest: a TFRecord file, only the cropped region decoded, all options on AUTOTUNE."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from measuring.data import Data, prepare_small, warm

from shardprep.formats import open_dataset

FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def records(data: Data) -> Iterator[int]:
    _write_files(data)
    return _batches(data.tfrecord, data, "INTEGER_ACCURATE")


def records_fast(data: Data) -> Iterator[int]:
    """Return the batches by the faster transform, of which some pixels differ."""
    _write_files(data)
    return _batches(data.tfrecord, data, "INTEGER_FAST")


def records_small(data: Data) -> Iterator[int]:
    """Return the batches from the images that the shards of smaller images have."""
    if not data.tfrecord_small.exists():
        prepare_small(data)
        with open_dataset(data.small) as dataset:
            records = (dataset[number] for number in range(len(dataset)))
            write(data.tfrecord_small, ((record.image, record.label) for record in records))
    return _batches(data.tfrecord_small, data, "INTEGER_ACCURATE")


def _write_files(data: Data) -> None:
    if not data.tfrecord.exists():
        write(data.tfrecord, ((path.read_bytes(), label) for path, label in data.files()))


def write(path: Path, images: Iterable[tuple[bytes, int]]) -> None:
    """Write images and labels as TFRecords."""
    partial = path.with_suffix(".partial")
    with tf.io.TFRecordWriter(os.fspath(partial)) as writer:
        for content, label in images:
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
            number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
            features = tf.train.Features(feature={"image": image, "label": number})
            writer.write(tf.train.Example(features=features).SerializeToString())
    partial.rename(path)


def _batches(path: Path, data: Data, dct_method: str) -> Iterator[int]:
    warm([path])
    options = tf.data.Options()
    options.deterministic = False
    batches = (
        tf.data.TFRecordDataset(os.fspath(path))
        .repeat()
        .shuffle(1000)
        .map(lambda example: _load(example, data.size, dct_method), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(data.batch, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )
    for images, _ in batches:
        yield int(images.shape[0])


def _load(example: Any, size: int, dct_method: str) -> Any:
    """The same random resized crop and flip: share of the area, log-uniform aspect, bilinear."""
    parsed = tf.io.parse_single_example(example, FEATURES)
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(parsed["image"]),
        tf.zeros([1, 0, 4]),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
    pixels = tf.io.decode_and_crop_jpeg(parsed["image"], window, channels=3, dct_method=dct_method)
    resized = tf.cast(tf.image.resize(pixels, [size, size]), tf.uint8)
    return tf.image.random_flip_left_right(resized), parsed["label"]
