"""This project's contender of remote_speed.py: encoded images from a bucket, or from a local copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from measuring.remote_child import Settings

from shardprep import Loader, LocalShuffle


@dataclass
class Epochs:
    loader: Loader[Any]

    def __iter__(self) -> Iterator[int]:
        for _, labels in self.loader:
            yield len(labels)


def open_epochs(settings: Settings) -> Epochs:
    remote = {"cache": settings.cache, "cache_limit": settings.limit} if "://" in settings.url else {}
    order = LocalShuffle(settings.window)
    loader = Loader(
        settings.url, batch_size=settings.batch, shuffle=order, workers=settings.workers, **remote
    )
    return Epochs(loader)
