"""The copy of a published dataset, or of a folder of splits, from object storage or a server."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT, RetryPolicy
from shardprep.formats.system.user_path import user_path

from .fetched_dataset import FetchedDataset

AT_ONCE = 8


def fetch(
    url: str,
    folder: str | os.PathLike[str],
    *,
    shards: Sequence[int] | None = None,
    at_once: int = AT_ONCE,
    retries: int = PATIENT.retries,
    timeout_s: float = PATIENT.timeout_s,
    progress: Progress | None = None,
) -> list[FetchedDataset]:
    """Copy a published dataset into a folder, each byte verified. After a kill, the same call goes on.

    A file has its name only when its size and SHA-256 are those in the manifest; the manifest comes last. A
    file that is there is kept if it is right, which its SHA-256 is computed for, and is fetched anew
    otherwise; so the same call also repairs a copy. What was downloaded of a file before a kill is kept, too.

    ``url`` is the place of a dataset, or of a folder of splits, of which each is fetched into
    ``folder/<split>``: ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` or ``file://``. It has no
    user and no query; credentials are found in the environment. ``folder`` is new or empty, or one that the
    same call began or finished. ``shards`` are the numbers of the shards to fetch, None for all; the manifest
    is published once all are there. ``at_once`` is the number of files that are downloaded at the same time,
    ``retries`` how often a request that failed is sent again, and ``timeout_s`` after how many seconds
    without a byte it has failed. ``progress`` receives the progress, in bytes; None shows a bar in
    a notebook.

    Raises UsageError (PlanMismatch for a folder with anything else); ManifestDamaged and UnknownVersion for
    what is no dataset there; RemoteDamaged or RemoteMissing for a file that is not as the manifest lists it,
    after several downloads; OperationError (RemoteFailed, OutputBusy, NoSpace); OSError. Needs obstore.
    """
    if at_once < 1:
        raise UsageError("at_once must be at least 1")
    place, policy = Location.parse(url), RetryPolicy(retries, timeout_s)
    from .copying import fetched_copies  # start-up time: asyncio

    return fetched_copies(place, user_path(folder), shards, policy, at_once=at_once, progress=shown(progress))
