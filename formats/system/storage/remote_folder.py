"""A folder in object storage or on a server, read through obstore."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.system.owned import Owned

from .failures import AnswerBroken, RemoteMissing, translated
from .location import Location, is_loopback
from .stored_file import StoredFile

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore

CHUNK_BYTES = 1 << 20  # as much is hashed and written at once
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
FIRST_WAIT, LONGEST_WAIT = timedelta(milliseconds=100), timedelta(seconds=10)
SETTLE_S = 0.1
RETRY_TIME = timedelta(minutes=4)  # of one request; signatures of requests hold for 5 minutes

_inherited = False


def _note_fork() -> None:
    """Remember in a forked process that obstore was there before: its threads were not copied."""
    global _inherited
    _inherited = "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


@cache
def _settle_at_exit() -> None:
    """Let threads of obstore that hand over results leave Python before it ends, which aborts the process."""
    atexit.register(time.sleep, SETTLE_S)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request that failed is sent again, and how many seconds may pass without a byte."""

    retries: int
    timeout_s: float

    def __post_init__(self) -> None:
        if self.retries < 0 or not self.timeout_s > 0:
            raise UsageError("retries must be at least 0 and timeout_s more than 0")


PATIENT = RetryPolicy(retries=10, timeout_s=30.0)  # of what is read


class RemoteFolder(Owned):
    """A folder that is read over the network; the same for every kind of store.

    Credentials are found as the store's own tools do: in environment variables, files that these name, and
    the service of a cloud machine. An instance is for the process that made it. Raises OperationError where
    obstore is not installed; UsageError in a process that was forked after obstore was imported, which would
    wait forever; RemoteMissing for a folder of this machine that is not there; RemoteFailed, RemoteDenied.
    """

    def __init__(self, place: Location, policy: RetryPolicy) -> None:
        self.place = place
        self._policy = policy
        self._store = self._opened()

    def _opened(self) -> ObjectStore:
        refuse_forked()
        try:
            from obstore.store import from_url  # start-up time, and the package is an extra
        except ImportError as error:
            raise OperationError(
                "reading it needs the package obstore: pip install 'shardprep[remote]'", path=self.place.url
            ) from error
        _settle_at_exit()
        if (folder := self.place.folder) is not None:
            return self._local(folder)
        with translated(self.place):
            return from_url(
                self.place.url,
                config=self._config(),
                client_options=self._client(),
                retry_config=self._retries(),
            )

    def _local(self, folder: Path) -> ObjectStore:
        from obstore.store import LocalStore  # as above

        if not folder.is_dir():
            raise RemoteMissing("there is no such folder", path=self.place.url)
        return LocalStore(folder)

    def _config(self) -> Any:
        """Return what is asked of this kind of store beside what the environment says."""
        return {}

    def _client(self) -> ClientConfig:
        return {
            "allow_http": may_use_http(self.place),
            "timeout": timedelta(days=1),  # of a whole file
            "read_timeout": timedelta(seconds=self._policy.timeout_s),
            "connect_timeout": timedelta(seconds=self._policy.timeout_s),
        }

    def _retries(self) -> Any:
        backoff = {"init_backoff": FIRST_WAIT, "max_backoff": LONGEST_WAIT, "base": 2}
        return {"max_retries": self._policy.retries, "retry_timeout": RETRY_TIME, "backoff": backoff}

    async def read(self, name: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield a file from byte ``start``, in chunks of about CHUNK_BYTES, as long as the server sends any.

        Raises RemoteMissing, RemoteDenied, RangeRefused where ``start`` is not 0 and the server sends whole
        files only or the file is shorter, AnswerBroken where the answer ends too early, and RemoteFailed for
        anything else, after the retries.
        """
        import obstore  # as above

        with translated(self.place, name):
            options: GetOptions | None = {"range": {"offset": start}} if start else None
            found = await obstore.get_async(self._store, name, options=options)
        with translated(self.place, name, AnswerBroken):
            async for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                yield chunk

    async def part(self, name: str, start: int, length: int) -> tuple[bytes, StoredFile]:
        """Return ``length`` bytes of a file from byte ``start``, at least one, and what the store says of it.

        The bytes are fewer only where the answer is wrong. Raises what :meth:`read` raises.
        """
        import obstore  # as above

        with translated(self.place, name):
            found = await obstore.get_async(self._store, name, options={"range": (start, start + length)})
        with translated(self.place, name, AnswerBroken):
            return bytes(await found.bytes_async()), StoredFile.of(found.meta)

    async def about(self, name: str) -> StoredFile | None:
        """Return what the store says of a file, None if it is not there. Raises RemoteFailed."""
        import obstore  # as above

        try:
            with translated(self.place, name):
                return StoredFile.of(await obstore.head_async(self._store, name))
        except RemoteMissing:
            return None

    async def files(self) -> dict[str, StoredFile]:
        """Return what the store says of each file in this folder, without those of folders in it.

        A web server lists none, and fails.
        """
        import obstore  # as above

        with translated(self.place):
            listed = await obstore.list_with_delimiter_async(self._store)
        return {found["path"].rpartition("/")[2]: StoredFile.of(found) for found in listed["objects"]}

    async def folders(self) -> list[str]:
        """Return the names of the folders in this one; empty for a server that lists none.

        Raises RemoteDenied, RemoteFailed.
        """
        import obstore  # as above

        if self.place.scheme in ("http", "https"):
            return []
        with translated(self.place):
            listed = await obstore.list_with_delimiter_async(self._store)
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]]


def refuse_forked() -> None:
    """Raise UsageError in a process that was forked after obstore was imported: its threads are not there."""
    if _inherited:
        raise UsageError(
            "obstore does not work in a process that was forked from one that had imported it; start this one by "
            "multiprocessing's 'spawn'"
        )


def may_use_http(place: Location) -> bool:
    """Whether the place may be read without TLS: its URL says so, or its endpoint is this machine's."""
    if place.scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        return True
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")
    return is_loopback(endpoint)
