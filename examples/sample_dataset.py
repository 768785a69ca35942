"""A dataset for the examples: a given one, or a miniature that is made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardprep import convert, make_sample


@contextmanager
def dataset_at(path: Path | None) -> Iterator[Path]:
    """Yield ``path``, or a temporary folder with train/ (300 images of 10 classes) and val/ (100)."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="shardprep-example-") as folder:
        make_sample(Path(folder, "archives"))
        convert(Path(folder, "archives"), Path(folder, "shards"))
        yield Path(folder, "shards")
