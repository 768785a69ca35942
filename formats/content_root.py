"""One name for the images and labels of a dataset, however it is stored."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3


def content_root(digests: Iterable[bytes]) -> str:
    """``blake3:<hex>`` over the records' digests in stored order, given in pieces of any size.

    Equal for LMDB and HDF5 and any shard size where order, keys, labels and images are equal.
    """
    root = blake3(b"shardprep-content-1\0")
    for piece in digests:
        root.update(piece)
    return f"blake3:{root.hexdigest()}"
