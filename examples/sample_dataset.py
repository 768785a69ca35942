"""A dataset to try the examples on: yours, or a miniature that is made for the occasion."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardprep.formats import convert, make_sample


@contextmanager
def dataset_at(path: Path | None) -> Iterator[Path]:
    """``path``, or without it a temporary folder with train/ (300 images of 10 classes) and val/ (100)."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="shardprep-example-") as folder:
        make_sample(Path(folder, "archives"))
        convert(Path(folder, "archives"), Path(folder, "shards"))
        yield Path(folder, "shards")
