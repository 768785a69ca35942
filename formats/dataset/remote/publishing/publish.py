"""The publishing of a finished dataset, or of a folder of splits, in object storage."""

from __future__ import annotations

import os
from pathlib import Path

from shardprep.formats.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.user_path import user_path

from .published_dataset import PublishedDataset

AT_ONCE = 4
RETRIES = 10
TIMEOUT_S = 120.0  # a part of 8 MiB is sent within, on a line of 0.6 MB/s


def publish(
    folder: str | os.PathLike[str],
    url: str,
    *,
    at_once: int = AT_ONCE,
    retries: int = RETRIES,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> list[PublishedDataset]:
    """Copy a finished dataset to object storage, each byte verified. After a kill, the same call goes on.

    A file is uploaded only if its SHA-256 is that in the manifest, and it is proven to be in the store: its
    ETag there is the MD5 of the local file; where a store's ETags are no MD5, it is read back. What is there
    and right is kept. The manifest comes last, only if there is none, after all files were
    looked at once more. So a place never holds parts of two datasets: of two that are uploaded to one
    place, one gets an error.

    ``folder`` is a dataset, or a folder of splits, of which each is published in ``url/<split>``. ``url`` is
    a new or empty place, or one where the same call began or finished: ``s3://``, ``gs://``, ``az://`` or
    ``file://``. It has no user and no query; credentials are found in the environment. ``at_once`` is the
    number of files that are uploaded at the same time, ``retries`` how often a request that failed is sent
    again, and ``timeout_s`` after how many seconds without an answer it has failed. ``progress`` receives
    the progress, in bytes; None shows a bar in a notebook.

    Raises UsageError (PlanMismatch for a place with another dataset); ManifestDamaged and ShardDamaged for a
    local dataset that is not finished or not intact; RemoteDamaged for what is not right in the store, after
    several uploads; OperationError (RemoteFailed, RemoteDenied); OSError. Needs obstore.
    """
    if at_once < 1:
        raise UsageError("at_once must be at least 1")
    place, policy = Location.parse(url), RetryPolicy(retries, timeout_s)
    local = _datasets(user_path(folder))
    from .uploading import published_datasets  # start-up time: asyncio

    targets = {place.child(split) if split else place: one for split, one in local.items()}
    return published_datasets(targets, policy, at_once=at_once, progress=shown(progress))


def _datasets(path: Path) -> dict[str, tuple[Path, Manifest]]:
    """Return the dataset in a folder by the name "", or each split by its own; all are finished."""
    folders = splits_of(path) or {"": path}
    found = {split: (folder, read_manifest(folder)) for split, folder in folders.items()}
    for folder, manifest in found.values():
        if manifest.archive:
            raise UsageError(
                f"has its images in an archive, beside {MANIFEST_NAME}: copy the archive, and prep index makes "
                "the same dataset of it",
                path=folder,
            )
    return found
