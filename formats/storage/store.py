"""Object storage and servers: places as URLs, folders read and written through obstore, and what can fail."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from configparser import ConfigParser, Error as ConfigError
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shardprep.formats.errors import DataError, MissingExtra, OperationError, ShardprepError, UsageError
from shardprep.formats.runtime.files import flush_file, redacted, user_path
from shardprep.formats.runtime.loop_thread import in_thread
from shardprep.formats.runtime.owned import Owned

if TYPE_CHECKING:
    from obstore import GetOptions, ListResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore


OTHER_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
EXPORT = 'eval "$(aws configure export-credentials --format env)" exports them'


def profile_config() -> dict[str, str]:
    """Return the settings of the profile ``AWS_PROFILE``, or of the default one, for obstore.

    Credentials in the environment come first. Raises UsageError for a profile that is named and not there, or
    has no keys, such as one of a role or of a single sign-on; and for a file that cannot be parsed.
    """
    has_keys, has_region = (any(map(os.environ.get, names)) for names in (OTHER_CREDENTIALS, REGIONS))
    if has_keys and has_region:
        return {}
    name = os.environ.get("AWS_PROFILE", "")
    title = name if name in ("", "default") else f"profile {name}"
    found = _section("AWS_CONFIG_FILE", "~/.aws/config", title or "default")
    found |= _section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default")
    taken = {} if has_region or "region" not in found else {"region": found["region"]}
    if has_keys:
        return taken
    keys = {key: found[theirs] for theirs, key in KEYS.items() if theirs in found}
    if name and not keys:
        lacks = "has no keys" if found else "is not in ~/.aws"
        raise UsageError(f"the profile {name!r}, which AWS_PROFILE names, {lacks}; {EXPORT}")
    return taken | keys


def _section(variable: str, path: str, name: str) -> dict[str, str]:
    """Return a section of a file; empty where either is not there."""
    file = os.environ.get(variable) or os.path.expanduser(path)  # noqa: PTH111 - there may be no home
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (ConfigError, UnicodeDecodeError) as error:
        # not the parser's message, which quotes the line
        raise UsageError(f"is no file of profiles ({type(error).__name__})", path=file) from None
    return dict(parser[name]) if parser.has_section(name) else {}


SCHEMES = ("s3", "gs", "az", "https", "http", "file")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_PLACE = re.compile(r"(\[[^\]/]*\]|[^/:]*)(:\d+)?(/|$)")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in object storage, on a server or on this machine: a URL without secrets and last ``/``."""

    url: str

    @classmethod
    def parse(cls, url: str) -> Location:
        """Return the place of a URL that a user gives. Raises UsageError, which shows no secret."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            hint = "" if separator else "; for a folder on this machine write file:// and its full path"
            raise UsageError(f"is not a URL with one of {', '.join(SCHEMES)}{hint}", path=redacted(url))
        if redacted(url) != url:
            raise UsageError(
                "has a user, a query, a fragment or parameters; give the URL without them, and credentials "
                "in the environment",
                path=redacted(url),
            )
        if not rest.strip("/") or (scheme == "file") != rest.startswith("/"):
            wanted = "file:///FOLDER" if scheme == "file" else f"{scheme}://PLACE/FOLDER"
            raise UsageError(f"is not a URL such as {wanted}", path=url)
        if not _PLACE.match(rest):  # what follows may be a password
            raise UsageError("has a port that is not a number", path=f"{scheme}://…")
        return cls(url.rstrip("/"))

    @property
    def scheme(self) -> str:
        """The URL's scheme, one of SCHEMES."""
        return self.url.partition("://")[0]

    @property
    def folder(self) -> Path | None:
        """The folder on this machine, None if the place is elsewhere."""
        return Path(unquote(urlsplit(self.url).path)) if self.scheme == "file" else None

    @property
    def name(self) -> str:
        """The last name of the place."""
        return self.folder.name if self.folder else self.url.rpartition("/")[2]

    def child(self, name: str) -> Location:
        """Return the folder of that name in this one."""
        return Location(f"{self.url}/{name}")


def path_or_place(given: str | os.PathLike[str]) -> Path | Location:
    """Return a path as a user gives it, or the place of a URL. Raises UsageError for a URL that is none."""
    return Location.parse(given) if isinstance(given, str) and "://" in given else user_path(given)


class RemoteMissing(DataError):
    """A file is not in the bucket or on the server where it should be."""


class RemoteFailed(OperationError):
    """A bucket or a server does not answer, or refuses to."""

    may_pass = False
    """Whether the same request can succeed later."""


class NothingThere(RemoteFailed):
    """There is no such bucket or folder, or no dataset in it."""


class RemoteDenied(RemoteFailed):
    """A bucket or a server gives no access."""


class AnswerBroken(RemoteFailed):
    """An answer began, and stopped or broke off before its end, or was not what was asked for."""

    may_pass = True


class OtherFile(AnswerBroken):
    """A file is not the one that was there before."""


class RangeRefused(RemoteFailed):
    """A server sends no part of a file, only the whole."""


CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for keys in ~/.aws, or AWS_SKIP_SIGNATURE=true "
    "for a public bucket; AWS_REGION and AWS_ENDPOINT_URL say where the bucket is",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}
_CREDENTIAL_SIGNS = (
    "/169.254.",
    "//metadata.google",
    "token request",
    "Missing AccessKeyId",
    "Account must be",
)
AGAIN = "try again; finished files are kept"
NOWHERE = "127.0.0.1:0"  # to which nothing connects
REDIRECT_HOSTS = "SHARDPREP_REDIRECT_HOSTS"
LOOK = "check the URL, and the region and endpoint in the environment"
_NO_RANGE = "Requested range was invalid"  # of a folder on this machine
_REFUSED = re.compile(r": (3|4(?!08|29))")
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z'-]*(?: [A-Za-z'-]+)*)?)")
_REASONS = {
    "RequestTimeTooSkewed": "the clock of this machine differs from the server's; set it",
    "ExpiredToken": "the credentials have expired",
}
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CAUSES = {
    "TimedOut": "no bytes arrived within the timeout",
    "kind: Timeout": "no bytes arrived within the timeout",
    "dns error": "there is no host with that name",
    "kind: Connect": "no connection",
    "IncompleteBody": "the response was cut off",
    "IncompleteMessage": "the response was cut off",
    "kind: Interrupted": "the response was cut off",
    "ConnectionReset": "the connection broke",
    "builder error": "http:// without TLS, which AWS_ALLOW_HTTP=true allows",
}


@contextmanager
def translated(
    place: Location, name: str | None = None, failed: type[RemoteFailed] = RemoteFailed
) -> Iterator[None]:
    """Raise errors of obstore as those of this package, for the file ``name`` of a place.

    Raises NothingThere, RemoteMissing, RemoteDenied, RangeRefused, and ``failed`` for anything else.
    """
    from obstore import exceptions  # start-up time, and the package is an extra

    try:
        yield
        return
    except (FileNotFoundError, PermissionError, exceptions.BaseError) as error:
        # obstore keeps an error until it is called again, and its traceback would keep the callers' frames
        error.__traceback__ = None
        text = str(error)
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            failure = _missing(_answer(text), place, name)
        elif isinstance(
            error, PermissionError | exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        ):
            failure = _denied(_answer(text), place, name)
        elif isinstance(error, exceptions.NotSupportedError):
            failure = RangeRefused("does not support range requests", path=place.url, shard=name)
        else:
            failure = _failed(text, place, name, failed)
    raise failure from None  # what obstore says can hold parts of a signature


def _missing(status: str, place: Location, name: str | None) -> ShardprepError:
    if name is None or "NoSuchBucket" in status:
        return NothingThere(f"does not exist{status}; {LOOK}", path=place.url)
    return RemoteMissing(f"is not there{status}", path=place.url, shard=name)


def _denied(status: str, place: Location, name: str | None) -> RemoteDenied:
    reason = next((f"; {reason}" for code, reason in _REASONS.items() if code in status), _advice(place))
    return RemoteDenied(f"gives no access{status}{reason}", path=place.url, shard=name)


def _failed(text: str, place: Location, name: str | None, failed: type[RemoteFailed]) -> ShardprepError:
    status, said = _answer(text), text.partition("\n")[0]
    if any(sign in said for sign in _CREDENTIAL_SIGNS):
        return RemoteDenied(f"there are no credentials for it{_advice(place)}", path=place.url, shard=name)
    if any(code in status for code in _REASONS):  # some of these have another status than 403
        return _denied(status, place, name)
    if status.startswith(": 404"):  # of a listing
        return _missing(status, place, name)
    if NOWHERE in text:
        return RemoteFailed(
            f"redirects to another host; if you trust that, name it in {REDIRECT_HOSTS} (host,host or *)",
            path=place.url,
            shard=name,
        )
    if "non-partial response" in said:
        return RangeRefused("does not support range requests", path=place.url, shard=name)
    if status.startswith(": 416") or _NO_RANGE in said:
        return RangeRefused(f"does not have that part of the file{status}", path=place.url, shard=name)
    may_pass = not (_REFUSED.match(status) or "region" in said)
    failure = failed(f"failed: {cause_of(text)}; {AGAIN if may_pass else LOOK}", path=place.url, shard=name)
    failure.may_pass = may_pass
    return failure


def cause_of(text: str) -> str:
    """Return in some words what obstore reports: the status of an answer, or what broke."""
    if status := _answer(text):
        return status.removeprefix(": ")
    found = next((cause for sign, cause in _CAUSES.items() if sign in text), None)
    return found or redacted(text.partition("\n")[0].rpartition(" - ")[2])


def _answer(text: str) -> str:
    """Return the status that a server answered with, and S3's name of the error; empty without an answer."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is None:
        return ""
    return f": {status[1]}" + (f" ({code[1]})" if code else "")


def _advice(place: Location) -> str:
    advice = CREDENTIALS.get(place.scheme)
    return f"; set {advice}" if advice else "; check its permissions"


@dataclass(frozen=True)
class StoredFile:
    """Metadata of a stored file: its size in bytes, and its ETag, which another content does not have.

    Where a server gives no ETag, the time of the last change is in its place.
    """

    size: int
    e_tag: str

    @classmethod
    def of(cls, found: ObjectMeta) -> StoredFile:
        """Return what obstore says of a file."""
        return cls(found["size"], (found["e_tag"] or found["last_modified"].isoformat()).strip('"'))


CHUNK_BYTES = 1 << 20  # as much is hashed and written at once
PIECE_BYTES = 1 << 16  # as much is taken from an answer at once, as long as none breaks off
LEAST_BYTES = 1 << 12  # of an answer that counts as progress, and in the time of two time-outs
TRIES = 4  # without progress
WAIT_S, LONGEST_WAIT_S = 0.1, 10.0  # after the first of them; longer after each
LISTING_S = 120.0  # of a whole list of files, which a server could go on with for ever
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
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


PATIENT = RetryPolicy(retries=10, timeout_s=30.0)  # for reading


class RemoteFolder(Owned):
    """A folder that is read, and with ``writable`` written, over the network, in any kind of store.

    Credentials are found as the store's own tools do: in environment variables, files that these name, the
    keys of a profile in ``~/.aws``, and the service of a cloud machine. An instance is for the process that
    made it. A file that is written is there as a whole or not at all; a ``writable`` folder of this machine
    is made where it is missing, and its files are flushed.

    Raises MissingExtra where obstore is not installed; UsageError in a process that was forked after obstore
    was imported, which would wait forever, and for a web server that is to be ``writable``; NothingThere for
    a folder of this machine that is not there; RemoteFailed, RemoteDenied.
    """

    def __init__(self, place: Location, policy: RetryPolicy, *, writable: bool = False) -> None:
        if writable:
            refuse_server(place)
        self.place = place
        self._policy, self._is_writable = policy, writable
        self._store = self._opened(policy.retries)
        # obstore goes on with an answer that breaks off, too, after pauses that get longer with each
        self._answers = self._opened(min(1, policy.retries))

    def _opened(self, retries: int) -> ObjectStore:
        refuse_forked()
        try:
            from obstore.store import LocalStore, from_url  # start-up time, and the package is an extra
        except ImportError as error:
            raise MissingExtra.of("access to it", "obstore", "remote", path=self.place.url) from error
        _settle_at_exit()
        if (folder := self.place.folder) is not None:
            if self._is_writable:
                folder.mkdir(parents=True, exist_ok=True)  # errors of obstore lack the path
            elif not folder.is_dir():
                raise NothingThere("there is no such folder", path=self.place.url)
            with translated(self.place):
                return LocalStore(folder, automatic_cleanup=self._is_writable)
        config: Any = profile_config() if self.place.scheme == "s3" else {}
        if self._is_writable and self.place.scheme == "s3":
            # not every store with the interface of S3 knows the request that deletes many files
            config["disable_bulk_delete"] = True
        client: ClientConfig = {
            **_redirects_of(self.place),
            "allow_http": may_use_http(self.place),
            "timeout": timedelta(days=1),  # of a whole file
            "read_timeout": timedelta(seconds=self._policy.timeout_s),
            "connect_timeout": timedelta(seconds=self._policy.timeout_s),
        }
        first, longest = timedelta(seconds=WAIT_S), timedelta(seconds=LONGEST_WAIT_S)
        backoff: Any = {"init_backoff": first, "max_backoff": longest, "base": 2}
        retry: Any = {"max_retries": retries, "retry_timeout": RETRY_TIME, "backoff": backoff}
        with translated(self.place):
            return from_url(self.place.url, config=config, client_options=client, retry_config=retry)

    async def read(
        self, name: str, start: int = 0, stop: int | None = None, *, only: StoredFile | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file from byte ``start``, to ``stop`` if given, in chunks of about CHUNK_BYTES.

        Without ``stop``, the bytes are fewer where an answer says that there are no more. A request that
        fails is sent again as the policy says. An answer that breaks off, is of another length or file, or
        brings less than LEAST_BYTES in the time of two time-outs, is asked for again from its last byte, as
        long as one of TRIES brings LEAST_BYTES.

        Raises AnswerBroken after that, or OtherFile if the file is not ``only`` that one; RemoteMissing,
        RemoteDenied, and RemoteFailed for anything else, after the retries; RangeRefused where a part is
        asked for and the server sends whole files only, or the file is shorter.
        """
        fruitless, is_coarse = 0, True
        while True:
            begun, size = start, 0
            pieces: list[bytes] = []
            failure: RemoteFailed | None = None
            try:
                async with aclosing(self._answer(name, start, stop, only, is_coarse=is_coarse)) as answer:
                    async for piece in answer:
                        pieces.append(piece)
                        start, size = start + len(piece), size + len(piece)
                        if size >= CHUNK_BYTES:
                            yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
                            pieces, size = [], 0
            except RemoteFailed as error:
                if not error.may_pass:
                    raise
                failure = error
            if pieces:
                yield b"".join(pieces)
            if failure is None or start == stop:
                return
            fruitless = 0 if start - begun >= LEAST_BYTES else fruitless + 1
            if isinstance(failure, AnswerBroken):
                is_coarse, tries, wait_s = False, TRIES, WAIT_S * fruitless
            else:  # each of two requests
                tries, wait_s = 1 + self._policy.retries // 2, min(LONGEST_WAIT_S, WAIT_S * 4**fruitless)
            if fruitless >= tries:
                raise failure
            await asyncio.sleep(wait_s)

    async def _answer(
        self, name: str, start: int, stop: int | None, only: StoredFile | None, *, is_coarse: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield what one answer brings, as it arrives; ``is_coarse`` is faster, and can lose some of it."""
        import obstore  # as above

        options: GetOptions | None = None
        if stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}
        with translated(self.place, name):
            found = await obstore.get_async(self._answers, name, options=options)
        if only not in (None, StoredFile.of(found.meta)):
            raise OtherFile("is not the same file as before", path=self.place.url, shard=name)
        arrived, left_s = 0, 2 * self._policy.timeout_s
        is_whole = is_coarse and stop is not None and stop - start <= CHUNK_BYTES
        pieces = None if is_whole else aiter(found.stream(min_chunk_size=PIECE_BYTES if is_coarse else 1))
        while True:
            asked = time.monotonic()
            try:
                with translated(self.place, name, AnswerBroken):
                    async with asyncio.timeout(left_s):
                        piece: Any = await (found.bytes_async() if pieces is None else anext(pieces))
            except StopAsyncIteration:
                break
            except TimeoutError as error:
                raise AnswerBroken(
                    f"failed: {arrived:,} bytes came in {2 * self._policy.timeout_s:g} s; {AGAIN}",
                    path=self.place.url,
                    shard=name,
                ) from error
            start += len(piece)
            if stop is not None and start > stop:
                break
            yield piece
            if pieces is None:
                break
            arrived, left_s = arrived + len(piece), left_s - (time.monotonic() - asked)
            if arrived >= LEAST_BYTES:
                arrived, left_s = 0, 2 * self._policy.timeout_s
        if stop not in (None, start):
            raise AnswerBroken(
                f"did not return the requested bytes; {AGAIN}", path=self.place.url, shard=name
            )

    async def about(self, name: str) -> StoredFile | None:
        """Return the store's metadata of a file, None if it is not there. Raises RemoteFailed."""
        import obstore  # as above

        try:
            with translated(self.place, name):
                return StoredFile.of(await obstore.head_async(self._store, name))
        except RemoteMissing:
            return None

    async def files(self) -> dict[str, StoredFile]:
        """Return the store's metadata of each file in this folder, without those of folders in it.

        A web server lists none, and fails.
        """
        listed = await self._listed()
        return {found["path"].rpartition("/")[2]: StoredFile.of(found) for found in listed["objects"]}

    async def folders(self) -> list[str]:
        """Return the names of the folders in this one; empty for a server that lists none.

        Raises RemoteDenied, RemoteFailed.
        """
        if self.place.scheme in ("http", "https"):
            return []
        listed = await self._listed()
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]]

    async def _listed(self) -> ListResult[Sequence[ObjectMeta]]:
        import obstore  # as above

        try:
            with translated(self.place):
                async with asyncio.timeout(LISTING_S):
                    return await obstore.list_with_delimiter_async(self._store)
        except TimeoutError as error:
            raise RemoteFailed(
                f"did not finish listing its files within {LISTING_S:g} s", path=self.place.url
            ) from error

    async def content(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of a file, None if it is not there. Raises RemoteFailed."""
        with suppress(RemoteMissing):
            return await self.first_bytes(name, most)
        return None

    async def first_bytes(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file. Raises what :meth:`read` does."""
        data = bytearray()
        async with aclosing(self.read(name)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) >= most:
                    break
        return bytes(data[:most])

    async def create(self, name: str, data: bytes) -> bool:
        """Write a file only if there is none of that name; return whether it was written. Of several
        processes that do so at once, one gets True.
        """
        import obstore  # as above

        with translated(self.place, name):
            try:
                await obstore.put_async(self._store, name, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
        await self._flush(name)
        return True

    async def write(self, name: str, parts: AsyncGenerator[bytes, None], size: int) -> None:
        """Write a file of ``size`` bytes, in place of any other of that name.

        ``parts`` are its bytes, each of them :func:`part_bytes` long but the last.
        """
        import obstore  # as above

        bytes_of_part = part_bytes(size)
        with translated(self.place, name):
            async with aclosing(parts):
                if size <= bytes_of_part:
                    whole = b"".join([part async for part in parts])
                    await obstore.put_async(self._store, name, whole, use_multipart=False)
                else:
                    await obstore.put_async(
                        self._store, name, parts, chunk_size=bytes_of_part, max_concurrency=PARTS_AT_ONCE
                    )
        await self._flush(name)

    async def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        import obstore  # as above

        with suppress(RemoteMissing), translated(self.place, name):
            await obstore.delete_async(self._store, name)

    async def _flush(self, name: str) -> None:
        if (folder := self.place.folder) is not None:
            for path in (folder / name, (folder / name).parent):
                await in_thread(flush_file, path)


MEBIBYTE = 1 << 20
PART_BYTES = 8 * MEBIBYTE  # of a file that is sent in parts; a slow line sends one within the timeout
MOST_PARTS = 10_000  # of one file, which S3 allows
PARTS_AT_ONCE = 2  # of one file: several files are sent at once


def part_bytes(size: int) -> int:
    """Return the size of the parts that a file of that size is sent in; the last may be smaller.

    >>> part_bytes(1 << 30) >> 20, part_bytes(200 << 30) >> 20
    (8, 21)
    """
    return max(PART_BYTES, -(-size // (MOST_PARTS * MEBIBYTE)) * MEBIBYTE)


def refuse_server(place: Location) -> None:
    """Raise UsageError for a place on a web server."""
    if place.scheme in ("http", "https"):
        raise UsageError(
            "is a web server, which accepts no files; give s3://, gs://, az:// or file://", path=place.url
        )


def refuse_forked() -> None:
    """Raise UsageError in a process that was forked after obstore was imported: its threads are not there."""
    if _inherited:
        raise UsageError(
            "obstore does not work in a process that was forked from one that had imported it; start this one by "
            "multiprocessing's 'spawn'"
        )


def _redirects_of(place: Location) -> ClientConfig:
    """Return what keeps redirects of a server from other hosts: for these there is a proxy that is not.

    REDIRECT_HOSTS in the environment are hosts that may be redirected to, or ``*``. A proxy in the
    environment decides itself. So do AWS, Google and Azure, whose credentials come from other hosts.
    """
    server = urlsplit(_endpoint() if place.scheme == "s3" else place.url)
    host, allowed = server.hostname or "", os.environ.get(REDIRECT_HOSTS, "").strip()
    is_own = server.scheme in ("http", "https") and (place.scheme != "s3" or _has_keys())
    if not is_own or allowed == "*" or (server.scheme in getproxies() and not proxy_bypass(host)):
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(filter(None, (host, allowed)))}


def _has_keys() -> bool:
    """Whether the credentials for S3 are in the environment, and no service is asked for them."""
    return any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"))


def may_use_http(place: Location) -> bool:
    """Whether the place may be read without TLS: its URL says so, or its endpoint is this machine's."""
    if place.scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        return True
    return urlsplit(_endpoint()).hostname in LOOPBACK


def _endpoint() -> str:
    """Return the URL of the server of S3 that the environment names; empty for AWS."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")
