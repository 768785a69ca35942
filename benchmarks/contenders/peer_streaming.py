"""MosaicML Streaming on its own shards (MDS) in a bucket: encoded images, in its default order of shuffling.

    pip install torch mosaicml-streaming

It reads the endpoint of S3 from ``S3_ENDPOINT_URL``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring.remote_child import Settings, images_in
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


@dataclass
class Epochs:
    loader: DataLoader[Any]

    def __iter__(self) -> Iterator[int]:
        for samples in self.loader:
            yield len(samples)


def write(images: Path, folder: Path, shard_bytes: int) -> None:
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=shard_bytes) as writer:
        for image, label in images_in(images):
            writer.write({"image": image, "label": label})


def open_epochs(settings: Settings) -> Epochs:
    clean_stale_shared_memory()  # of a round that was killed: it would be waited for
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    dataset = StreamingDataset(
        remote=settings.url,
        local=settings.cache,
        cache_limit=settings.limit,
        batch_size=settings.batch,
        shuffle=True,
        shuffle_block_size=settings.window,
    )
    return Epochs(
        DataLoader(
            dataset,
            batch_size=settings.batch,
            num_workers=settings.workers,
            collate_fn=list,
            persistent_workers=True,
        )
    )
