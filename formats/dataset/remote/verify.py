"""Verification of a dataset, in a folder or at a URL."""

from __future__ import annotations

import os
from concurrent.futures import Executor

from shardprep.formats.dataset.verification.report import Report
from shardprep.formats.dataset.verification.verify import check_level
from shardprep.formats.dataset.verification.verify import verify as verify_folder
from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress
from shardprep.formats.system.storage.location import Location, redacted

from .open_dataset import cache_for, limit_bytes, refuse_cache, url_of


def verify(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Report:
    """Check a dataset, and return every finding. Never changes the dataset, and does not crash on damage.

    ``dataset`` is its folder, or its URL. ``workers`` is the number of parallel reads; None or 0 is one per
    usable CPU. An ``executor`` of :mod:`concurrent.futures`, of this machine or of many, reads the shards of
    a folder instead, and is left open: at most ``workers`` at a time, None or 0 is 256. The report is that of
    this machine alone. ``progress`` receives the progress; None shows a bar in a notebook. Each ``level``
    includes the one before:

    ``quick``: the manifest matches its ``root``; its files exist with their sizes, and there are no others.

    ``full``: every SHA-256 matches. The index and the table of boxes fit the manifest: rows, shards, lengths
    (``image_bytes``), labels, boxes' records. So do the columns' tables. So the dataset can be opened.

    ``records``: every record matches its checksum and its row of the index, every value of a column its
    checksum, its record's key and its row of the table, and all match ``content_root``.
    Keys are unique; the order is the plan's; ``skipped`` and ``class_sorted`` are true, and so is ``partial``
    for the official classes (for others it depends on the source). If images were skipped, the plan's order
    and ``class_sorted`` cannot be checked. Each shard is read in a separate process.

    ``decode``: every image decodes, and every value of a column is one of its kind.

    The files at a URL pass through the cache in the folder ``cache``, of at most ``cache_limit`` bytes (a
    number, or a size as "200GiB"; None for what the disk has), which can be less than the dataset has. A
    damaged copy in the cache is replaced. Files that do not belong to the dataset are not looked for at a
    URL.

    No level compares with the source: ``source``, ``writer``, the classes' words and the boxes' coordinates
    are only protected by a pinned ``root``. Raises UnknownVersion, UsageError, OSError if the manifest cannot
    be read, and OperationError if the system allows no further thread; with an ``executor`` ExecutorFailed,
    and OtherMachine, which names a machine that sees another dataset, or none.
    """
    url = url_of(dataset)
    if url is None:
        refuse_cache(dataset, cache, cache_limit)
        return verify_folder(dataset, level=level, workers=workers, executor=executor, progress=progress)
    if executor is not None:
        raise UsageError(
            "is a URL, and an executor checks what lies in a folder; leave the executor out",
            path=redacted(url),
        )
    check_level(level)
    folder = cache_for(url, cache)
    from .caching.cached_files import verify_cached  # start-up time: asyncio

    return verify_cached(
        Location.parse(url), folder, limit_bytes(cache_limit), level, workers=workers, progress=progress
    )
