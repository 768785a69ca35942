"""Downloads of a dataset's files from a store, each retried until it has the bytes in the manifest."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.errors import ManifestDamaged, UsageError
from shardprep.formats.runtime.files import OPEN_FLAGS, name_in_os_errors, publish, read_at, write_at
from shardprep.formats.runtime.json_record import FILE_NAME
from shardprep.formats.runtime.loop_thread import LoopThread, call_in_thread, run_all
from shardprep.formats.runtime.owners import LockDescriptor, Owner
from shardprep.formats.runtime.progress import Progress, report_shards
from shardprep.formats.runtime.work_folder import add_resume_note
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.shards.manifest import MAX_MANIFEST_BYTES, Manifest
from shardprep.formats.shards.read import MANIFEST_NAME, FileEntry
from shardprep.formats.storage.store import (
    MIN_BYTES,
    PATIENT,
    TRIES,
    WAIT_S,
    Location,
    NothingThere,
    RangeRefused,
    RemoteDamaged,
    RemoteDenied,
    RemoteFolder,
    RemoteMissing,
    RetryPolicy,
)

SLICE_BYTES = 4 << 20
PUBLISH_AGAIN = "publish it there again, unless another dataset has replaced it"
PART_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class HashedBytes:
    """Bytes that are hashed and not kept, ``size`` so far."""

    def __init__(self) -> None:
        self.size, self._digest = 0, hashlib.sha256()

    @property
    def sha256(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"

    def append(self, data: bytes) -> None:
        self._digest.update(data)
        self.size += len(data)

    def clear(self) -> None:
        self.size, self._digest = 0, hashlib.sha256()


class HashedFile(HashedBytes, Owner):
    """A file that is hashed slice by slice, ``size`` bytes so far.

    With PART_FLAGS it is a temporary file, to be appended to and then published; a killed run leaves it.
    ``room`` bytes stay allocated when it is cleared. Not thread-safe. Raises OSError with the file's name.
    """

    room = 0

    def __init__(self, path: Path, flags: int = PART_FLAGS) -> None:
        super().__init__()
        self.path = path
        self.lock = LockDescriptor(os.open(path, flags, 0o666))  # taken by subclasses

    def hash_next(self) -> int:
        """Hash the next slice of the file; return its size, 0 at the end."""
        with name_in_os_errors(self.path):
            data = read_at(self.lock.fileno(), SLICE_BYTES, self.size)
        super().append(data)
        return len(data)

    def append(self, data: bytes) -> None:
        with name_in_os_errors(self.path):
            write_at(self.lock.fileno(), data, self.size)
        super().append(data)

    def clear(self) -> None:
        with name_in_os_errors(self.path):
            os.ftruncate(self.lock.fileno(), self.room)
        super().clear()

    def publish(self, final: Path) -> None:
        """Flush the file and rename it to ``final``, replacing an existing file."""
        with name_in_os_errors(self.path):
            os.fsync(self.lock.fileno())
        publish(self.path, final)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.lock.close()


def size_of(path: Path) -> int:
    """Return the size of a regular file; -1 for anything else, also a link, which a dataset does not have."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else -1
    return -1


@dataclass
class FileTransfer:
    """The transfer of a file, ``done`` bytes so far; ``is_done`` when whole, ``is_kept`` if it was there."""

    remote: RemoteFolder
    entry: FileEntry
    done: int = field(default=0, kw_only=True)
    is_done: bool = field(default=False, kw_only=True)
    is_kept: bool = field(default=False, kw_only=True)

    async def run(self) -> None:
        raise NotImplementedError


async def fill(
    remote: RemoteFolder,
    entry: FileEntry,
    part: HashedBytes,
    arrived: Callable[[int], object] = lambda size: None,
) -> None:
    """Download the missing bytes of a file until it is whole; at most TRIES times without progress.

    Bytes that may be right are kept. ``arrived`` gets each chunk's size, even if it is not kept. Raises
    RemoteDamaged if the file is never right, RemoteMissing, RemoteFailed, OSError.
    """
    most = fruitless = refused = 0
    while True:
        try:
            await _append_rest(remote, entry, part, arrived)
        except RemoteMissing as error:
            error.message += f"; {PUBLISH_AGAIN}"
            raise
        except RangeRefused:
            if not part.size or refused == TRIES:
                raise
            refused += 1
            if part.size < entry.size:  # otherwise an earlier response claimed that the file is longer
                await call_in_thread(part.clear)
            continue
        if (part.size, part.sha256) == (entry.size, entry.sha256):
            return
        if part.size < entry.size:
            cause = f"ends after {part.size:,} of {entry.size:,} bytes"
        else:
            cause = f"has more than {entry.size:,} bytes" if part.size > entry.size else "has another SHA-256"
            await call_in_thread(part.clear)
        fruitless += part.size < most + MIN_BYTES
        most = max(most, part.size)
        if fruitless == TRIES:
            raise RemoteDamaged(
                f"is not the file in the manifest: it {cause}; {PUBLISH_AGAIN}",
                path=remote.place.url,
                shard=entry.name,
            )
        await asyncio.sleep(WAIT_S * fruitless)


async def _append_rest(
    remote: RemoteFolder, entry: FileEntry, part: HashedBytes, arrived: Callable[[int], object]
) -> None:
    """Append the bytes that the server sends, at most one beyond the size."""
    if part.size >= entry.size:
        return
    async with aclosing(remote.read(entry.name, part.size)) as chunks:
        async for chunk in chunks:
            await call_in_thread(part.append, chunk[: entry.size + 1 - part.size])
            arrived(len(chunk))
            if part.size > entry.size:
                return


@dataclass
class Download(FileTransfer):
    """The copy of one file. The path is ``part`` until the file is whole and verified, then ``final``."""

    final: Path
    part: Path

    async def run(self) -> None:
        """Keep an intact file, or download it. Raises the errors of :func:`fill`."""
        if size_of(self.final) == self.entry.size:
            with closing(HashedFile(self.final, OPEN_FLAGS)) as existing:
                await self._hash(existing)
                self.is_kept = existing.sha256 == self.entry.sha256
        if not self.is_kept:
            with closing(HashedFile(self.part)) as part:
                await self._hash(part)
                await fill(self.remote, self.entry, part, lambda _: self._show(part))
                await call_in_thread(part.publish, self.final)
        self.is_done = True

    async def _hash(self, file: HashedFile) -> None:
        """Hash a file; an interruption waits for one slice of it."""
        while await call_in_thread(file.hash_next):
            self._show(file)

    def _show(self, file: HashedFile) -> None:
        self.done = min(file.size, self.entry.size)


@dataclass(frozen=True)
class RemoteDataset:
    """A published dataset: its folder and its manifest."""

    folder: RemoteFolder
    manifest: Manifest

    def refuse_archive(self) -> None:
        """Raise UsageError if the images stay in an archive."""
        if self.manifest.archive:
            raise UsageError(
                "has its images in an archive: download the archive, and make the same dataset with prep "
                "index",
                path=self.folder.place.url,
            )


async def find_datasets(place: Location, policy: RetryPolicy) -> dict[str, RemoteDataset]:
    """Return the dataset at a place under the name "", or the splits there by name.

    Where folders cannot be listed, it looks for train, val and test. Raises NothingThere, ManifestDamaged,
    UnknownVersion, RemoteFailed.
    """
    folder = RemoteFolder(place, policy)
    try:
        return {"": await read_dataset(folder)}
    except (RemoteMissing, RemoteDenied) as error:  # S3 denies missing files if listing is not allowed
        if splits := await _find_splits(folder, policy):
            return splits
        if isinstance(error, RemoteDenied):
            raise
        raise _unpublished_error(error) from error


def _unpublished_error(error: RemoteMissing | NothingThere) -> NothingThere:
    return NothingThere(
        f"{error.message}; check the URL: there is no dataset, or it is not published yet",
        path=error.path,
        shard=error.shard,
    )


async def _find_splits(folder: RemoteFolder, policy: RetryPolicy) -> dict[str, RemoteDataset]:
    """Return the splits in a folder. Raises NothingThere if a listed train, val or test has no dataset."""
    listed: set[str] = set()
    with suppress(RemoteDenied, RemoteMissing):
        names = [name.removesuffix("/") for name in await folder.list_files() if name.endswith("/")]
        listed = {*filter(FILE_NAME.fullmatch, names)}
    first = [name for name in SPLITS if name in listed or not listed]
    datasets: dict[str, RemoteDataset] = {}
    for name in (*first, *sorted(listed - set(first))):
        try:
            datasets[name] = await read_dataset(RemoteFolder(folder.place.child(name), policy))
        except (RemoteMissing, NothingThere) as error:  # the latter for a local folder
            if name in listed and name in SPLITS:
                raise _unpublished_error(error) from error
        except RemoteDenied:
            if listed:
                raise
    return datasets


async def read_dataset(folder: RemoteFolder) -> RemoteDataset:
    """Return the dataset in a folder. A damaged manifest is read again, as only the response may be damaged.

    Raises ManifestDamaged, UnknownVersion, RemoteMissing, RemoteFailed.
    """
    tried = 0
    while True:
        data = await folder.first_bytes(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
        if data.lstrip().startswith(b"<"):  # some servers send a page for every path
            missing = "is not there: the server sent a web page"
            raise RemoteMissing(missing, path=folder.place.url, shard=MANIFEST_NAME)
        if data.startswith(b"\x1f\x8b"):
            issue = "is sent compressed; store it, and let the server send it, without Content-Encoding"
            raise RemoteDamaged(issue, path=folder.place.url, shard=MANIFEST_NAME)
        try:
            if len(data) > MAX_MANIFEST_BYTES:
                raise ManifestDamaged(f"has more than {MAX_MANIFEST_BYTES} bytes, the limit for a manifest")
            return RemoteDataset(folder, Manifest.parse(data))
        except ManifestDamaged as error:
            error.path, error.shard = folder.place.url, MANIFEST_NAME
            if (tried := tried + 1) == TRIES:
                raise
        await asyncio.sleep(WAIT_S * tried)


def several_splits_error(splits: Mapping[str, object], place: Location) -> UsageError:
    """Return the error for the ``splits`` at a place where one dataset is needed."""
    names, first = ", ".join(splits), place.child(next(iter(splits))).url
    return UsageError(f"is a folder of splits ({names}); give one of them, such as {first}", path=place.url)


def datasets_at(place: Location) -> dict[str, RemoteDataset]:
    """Return the dataset at a place under the name "", or its splits, as :func:`find_datasets` does."""
    with LoopThread(threads=1) as loop:
        return loop.run(find_datasets(place, PATIENT))


def remote_dataset(place: Location) -> RemoteDataset:
    """Return the dataset at a place. Raises UsageError for a folder of splits, and the errors of fetching."""
    datasets = datasets_at(place)
    if "" not in datasets:
        raise several_splits_error(datasets, place)
    datasets[""].refuse_archive()
    return datasets[""]


@dataclass(frozen=True)
class TransferRun:
    """Runs transfers in an event loop, ``at_once`` at the same time."""

    loop: LoopThread
    at_once: int
    progress: Progress

    def run(
        self, verb: str, manifest: Manifest, transfers: Sequence[FileTransfer], *, kept: str = ""
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Transfer a dataset's files; return the names of the transferred ones, and of those kept.

        The first failure cancels the others, and is raised. An interruption notes how many are ``kept``.
        """
        names = {shard.name for shard in manifest.shards}
        shards, reported = [each for each in transfers if each.entry.name in names], 0

        def tick() -> None:
            nonlocal reported
            self.progress.at(0, sum(each.done for each in transfers))
            if (done := sum(each.is_done for each in shards)) > reported:
                reported = done
                report_shards(self.progress, done, len(shards))

        def done() -> str:
            count = sum(each.is_done for each in transfers)
            return f"{count} of {len(transfers)} {kept}" if kept and count else ""

        size = sum(each.entry.size for each in transfers)
        with add_resume_note(done), self.progress.task(f"{verb} {manifest.split}", records=0, size=size):
            self.loop.run(run_all([each.run for each in transfers], self.at_once), tick)
        moved = tuple(each.entry.name for each in transfers if not each.is_kept)
        return moved, tuple(each.entry.name for each in transfers if each.is_kept)
