"""litData on its own chunks in a bucket: encoded images, chunks and the items of a chunk in random order.

pip install torch litdata
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader
from litdata.streaming.cache import Cache
from measuring.remote_child import Settings, images_in


@dataclass
class Epochs:
    loader: Any

    def __iter__(self) -> Iterator[int]:
        for samples in self.loader:
            yield len(samples)


def write(images: Path, folder: Path, shard_bytes: int) -> None:
    cache = Cache(str(folder), chunk_bytes=shard_bytes)
    for number, (image, label) in enumerate(images_in(images)):
        cache[number] = {"image": image, "label": label}
    cache.done()
    cache.merge()


def copied(samples: list[dict[str, Any]]) -> list[tuple[bytes, int]]:
    """Copy the images out of the chunk: its memory views cannot go to another process."""
    return [(bytes(sample["image"]), sample["label"]) for sample in samples]


def open_epochs(settings: Settings) -> Epochs:
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server of the benchmark has no TLS
    dataset = StreamingDataset(
        settings.url, cache_dir=settings.cache, max_cache_size=settings.limit, shuffle=True, drop_last=False
    )
    loader = StreamingDataLoader(
        dataset,
        batch_size=settings.batch,
        num_workers=settings.workers,
        collate_fn=copied,
        persistent_workers=True,
    )
    return Epochs(loader)
