"""Repair: the damaged files of a dataset, and only these, are brought back to the same bytes."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from pathlib import Path

from shardprep.formats.conversion.repair import repair_from_source
from shardprep.formats.dataset.verification.report import Report
from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.user_path import user_path


def repair(
    dataset: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Bring back what ``verify(level="full")`` finds damaged or missing; return a new verification.

    Its ``rebuilt`` are the files that were replaced.

    ``dataset`` is the folder of the dataset. ``source`` is the path that it was converted from, or the URL of
    an intact copy, or of a folder of splits with one: ``s3://``, ``gs://``, ``az://``, ``https://``,
    ``http://`` or ``file://``. ``root`` is the folder that the paths of a list of images begin at; None is
    the list's own. ``workers``, ``executor`` and ``progress`` are as in
    :func:`~shardprep.formats.conversion.convert.convert`.

    A file is replaced only by one with the SHA-256 in the manifest, so the root stays the same, and files
    that are intact are left alone. Files that do not belong to the dataset are reported and left alone.

    From a path, the damaged files are rebuilt. For a damaged table the whole source is read, because its rows
    come from all records. Those of columns that :func:`~shardprep.formats.conversion.joining.join.join` added
    are reported and left alone: joining them again rebuilds them. From a URL, the damaged files are fetched,
    those of joined columns, too; what was received before a kill is kept.

    Raises ManifestDamaged if the manifest is damaged, PlanMismatch if the source, or the copy, is a different
    one, and what :func:`~shardprep.formats.conversion.convert.convert` or
    :func:`~shardprep.formats.dataset.remote.fetching.fetch.fetch` raises.
    """
    if not isinstance(source, Path) and "://" in (url := os.fspath(source)):
        if root is not None:
            raise UsageError("is the URL of a copy; root is for a list of images", path=url)
        from .refetching import repair_from_url  # start-up time: asyncio

        return repair_from_url(
            user_path(dataset),
            Location.parse(url),
            workers=workers,
            executor=executor,
            progress=shown(progress),
        )
    return repair_from_source(
        dataset, source, root=root, workers=workers, executor=executor, progress=progress
    )
