"""A published dataset, or a folder of splits, in object storage or on a server."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property

from shardprep.formats.dataset.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from shardprep.formats.dataset.manifest_shape.json_shape import FILE_NAME
from shardprep.formats.dataset.splits import USUAL_ORDER
from shardprep.formats.errors import ManifestDamaged, ShardprepError, UsageError
from shardprep.formats.system.storage.failures import AnswerBroken, RemoteDenied, RemoteMissing
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RemoteFolder, RetryPolicy

from .transfer import TRIES


@dataclass(frozen=True)
class RemoteDataset:
    """A dataset that can be fetched: its folder, and the bytes of its manifest."""

    folder: RemoteFolder
    data: bytes

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, validated as any other."""
        return Manifest.parse(self.data)

    def refuse_archive(self) -> None:
        """Raise UsageError for a dataset that has its images elsewhere."""
        if self.manifest.archive:
            raise UsageError(
                "has its images in an archive: download that, and prep index makes the same dataset of it",
                path=self.folder.place.url,
            )


async def find_datasets(place: Location, policy: RetryPolicy) -> dict[str, RemoteDataset]:
    """Return the dataset at a place by the name "", or each split in that folder by its own.

    A server that lists no folders is asked for train, val and test. Raises ManifestDamaged where there is
    nothing, or nothing right; UnknownVersion; RemoteFailed.
    """
    folder = RemoteFolder(place, policy)
    try:
        return {"": await _dataset_in(folder)}
    except (RemoteMissing, RemoteDenied) as error:  # S3 denies what is missing where listing is not allowed
        if found := await _splits_in(folder, policy):
            return found
        if isinstance(error, RemoteDenied):
            raise
        raise _unpublished(error) from error


def _unpublished(error: RemoteMissing) -> ManifestDamaged:
    return ManifestDamaged(
        f"{error.message}; not a dataset, or it is not published yet", path=error.path, shard=error.shard
    )


async def _splits_in(folder: RemoteFolder, policy: RetryPolicy) -> dict[str, RemoteDataset]:
    """Return the splits in a folder. Raises ManifestDamaged for a listed train, val or test without one."""
    listed = await _listed_in(folder)
    usual = [name for name in USUAL_ORDER if name in listed or not listed]
    found: dict[str, RemoteDataset] = {}
    for name in (*usual, *sorted(listed - set(usual))):
        try:
            found[name] = await _dataset_in(RemoteFolder(folder.place.child(name), policy))
        except RemoteMissing as error:
            if name in listed and name in USUAL_ORDER:
                raise _unpublished(error) from error
        except RemoteDenied:
            if listed:
                raise
    return found


async def _listed_in(folder: RemoteFolder) -> set[str]:
    """Return the names that splits may have of the folders in this one; empty if they are not listed."""
    try:
        return {name for name in await folder.folders() if FILE_NAME.fullmatch(name)}
    except (RemoteDenied, RemoteMissing):
        return set()


async def _dataset_in(folder: RemoteFolder) -> RemoteDataset:
    """Return the dataset in a folder; a damaged manifest is read again, at most TRIES times."""
    for tried in range(1, TRIES + 1):
        try:
            found = RemoteDataset(folder, await _manifest_bytes(folder))
            _ = found.manifest
        except (ManifestDamaged, AnswerBroken) as error:
            failure: ShardprepError = error
        else:
            return found
        if tried == TRIES:
            failure.path = folder.place.url
            failure.shard = MANIFEST_NAME
    raise failure


async def _manifest_bytes(folder: RemoteFolder) -> bytes:
    data = bytearray()
    async with aclosing(folder.read(MANIFEST_NAME)) as chunks:
        async for chunk in chunks:
            data += chunk
            if len(data) > MAX_MANIFEST_BYTES:
                raise ManifestDamaged(f"has more than the {MAX_MANIFEST_BYTES} bytes that any manifest has")
    return bytes(data)
