"""Object storage and web servers: locations, folders read and written through obstore, and their errors."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from configparser import ConfigParser, Error as ConfigError
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from shardprep.formats.errors import DataError, MissingExtra, OperationError, ShardprepError, UsageError
from shardprep.formats.runtime.files import FULL_DISK, flush_file, full_disk_error
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.runtime.progress import check_int, check_seconds
from shardprep.formats.runtime.user_paths import redact, user_path

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
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
    """Return obstore's settings from the profile ``AWS_PROFILE``, or the default one.

    Credentials in the environment take precedence. Raises UsageError for a named profile that does not exist
    or has no keys, such as one for a role or single sign-on, and for a file that cannot be parsed.
    """
    has_keys, has_region = (any(map(os.environ.get, names)) for names in (OTHER_CREDENTIALS, REGIONS))
    if has_keys and has_region:
        return {}
    name = os.environ.get("AWS_PROFILE", "")
    title = name if name in ("", "default") else f"profile {name}"
    profile = _section("AWS_CONFIG_FILE", "~/.aws/config", title or "default")
    profile |= _section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default")
    region = {} if has_region or "region" not in profile else {"region": profile["region"]}
    if has_keys:
        return region
    keys = {key: profile[theirs] for theirs, key in KEYS.items() if theirs in profile}
    if name and not keys:
        lacks = f"has no keys; {EXPORT}" if profile else "is not in ~/.aws; correct the name"
        raise UsageError(f"the profile {name!r}, which AWS_PROFILE names, {lacks}")
    return region | keys


def _section(variable: str, path: str, name: str) -> dict[str, str]:
    """Return a section of a file; empty if either does not exist."""
    file = os.environ.get(variable) or os.path.expanduser(path)  # noqa: PTH111 - there may be no home
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (ConfigError, UnicodeDecodeError) as error:
        # the parser's message would quote the line
        raise UsageError(f"is not a valid file of profiles ({type(error).__name__})", path=file) from None
    return dict(parser[name]) if parser.has_section(name) else {}


SCHEMES = ("s3", "gs", "az", "https", "http", "file")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in object storage, on a server or on this machine: a URL without secrets or trailing ``/``."""

    url: str

    @classmethod
    def parse(cls, url: str) -> Location:
        """Return the place of a user's URL. Raises UsageError, which shows no secret."""
        scheme, separator, rest = (url := str(url)).partition("://")
        if not separator or scheme not in SCHEMES:
            raise UsageError(
                f"is not a URL with one of {', '.join(SCHEMES)}; a folder on this machine is file:// and its full "
                "path",
                path=redact(url) or "''",
            )
        if redact(url) != url or _host_of(url) is None:  # do not show the rest: it may be a password
            raise UsageError(
                "has a user, a query, a fragment, parameters or an impossible port; give the URL without them, and "
                "credentials in the environment",
                path=f"{scheme}://…",
            )
        if scheme == "file":
            shape, example = "/+[^/]", "file:///FOLDER"
        else:
            shape, example = "[^/]+(/[^/]+)*/*$", f"{scheme}://PLACE/FOLDER"
        if not re.match(shape, rest):
            raise UsageError(f"is not a URL such as {example}", path=url)
        return cls(url.rstrip("/"))

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def folder(self) -> Path | None:
        """The folder on this machine, or None if the place is elsewhere."""
        path = unquote(urlsplit(self.url).path, errors="surrogateescape")  # as Path.as_uri() quotes it
        return Path(path) if self.scheme == "file" else None

    @property
    def name(self) -> str:
        return self.folder.name if self.folder else self.url.rpartition("/")[2]

    def child(self, name: str) -> Location:
        return Location(f"{self.url}/{name}")


def _host_of(url: str) -> str | None:
    """Return the host of a URL, which may be empty; None if the port is not a number up to 65535."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        return parts.hostname or ""
    except ValueError:
        return None


def path_or_place(path: str | os.PathLike[str]) -> Path | Location:
    """Return a user's path, or the place of a URL. Raises UsageError for an invalid URL."""
    return Location.parse(path) if isinstance(path, str) and "://" in path else user_path(path)


class RemoteMissing(DataError):
    """A file is not in the bucket or on the server where it should be."""


class RemoteDamaged(DataError):
    """A bucket or a server sends or keeps another file than it should."""


class RemoteFailed(OperationError):
    """A bucket or a server does not respond, or refuses the request."""

    may_pass = False
    """Whether the same request might succeed later."""


class NothingThere(RemoteFailed):
    """There is no such bucket or folder, or no dataset in it."""


class RemoteDenied(RemoteFailed):
    """A bucket or a server denies access."""


class AnswerBroken(RemoteFailed):
    """A response stalled, broke off, or was not what was requested."""

    may_pass = True


class OtherFile(AnswerBroken):
    """A file was replaced by another since it was last seen."""


class RangeRefused(RemoteFailed):
    """A server does not serve byte ranges, only whole files."""


CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for keys in ~/.aws, or AWS_SKIP_SIGNATURE=true "
    "for a public bucket; AWS_REGION and AWS_ENDPOINT_URL say where the bucket is",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}
AGAIN = "try again; finished files are kept"
NOWHERE = "127.0.0.1:0"  # an address that refuses every connection
REDIRECT_HOSTS = "SHARDPREP_REDIRECT_HOSTS"
LOOK = "check the URL, and the endpoint, region, credentials and proxies in the environment"
_WITHOUT_KEYS = re.compile(r"/169\.254\.|//metadata\.google|token request|S3 error: Missing |Account must be")
_DENIED = ("PermissionError", "PermissionDeniedError", "UnauthenticatedError")
_REFUSED = re.compile(r": (3|4(?!08|21|25|29)|501)(?!.*\((RequestTimeout|NoSuchUpload)\))")
_NO_LINKS = re.compile(r"Unable to rename file.*\(os error (1|5|38|95)\)")  # EIO: of rclone
_OTHER_RANGE = re.compile(r"Requested \d+\.\.\d+, got|(?i:Content.Range) header")
_LASTING = re.compile(
    "configured region|Config error|Content-Length Header|Invalid Access Key|SAS query|service account file|"
    "builder error|TooManyRedirects|InvalidCertificate|InvalidContentType"
)
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z'-]*(?: [A-Za-z'-]+)*)?)")
_REASONS = {
    "RequestTimeTooSkewed": "the clock of this machine differs from the server's; set it",
    "ExpiredToken": "the credentials have expired; renew them",
    "InvalidObjectState": "it is in an archive of the store; restore it there first",
}
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CAUSES = {
    "TimedOut": "no bytes arrived within the timeout",
    "kind: Timeout": "no bytes arrived within the timeout",
    "dns error": "there is no host with that name",
    "InvalidCertificate": "the server's certificate is not valid (for a CA of your own, set SSL_CERT_FILE)",
    "InvalidContentType": "the server does not speak TLS on that port",
    "TooManyRedirects": "the server redirects in a circle",
    "kind: Connect": "no connection to the server, or to the proxy that the environment names",
    "body error": "the response broke off",
    "builder error": "http:// without TLS, which AWS_ALLOW_HTTP=true allows",
    "Content-Length Header missing": "the server does not say how long the file is (Content-Length)",
}


@contextmanager
def translate_errors(
    place: Location, name: str | None = None, failed: type[RemoteFailed] = RemoteFailed
) -> Iterator[None]:
    """Translate errors of obstore into this package's, for the file ``name`` at a place.

    Raises NothingThere, RemoteMissing, RemoteDenied, RangeRefused, and ``failed`` for anything else.
    """
    from obstore import exceptions  # start-up time, and the package is an extra

    try:
        yield
        return
    except (FileNotFoundError, PermissionError, exceptions.BaseError) as error:
        # obstore keeps the error until its next call, and the traceback would keep the callers' frames
        error.__traceback__ = None
        failure = _error_for(type(error).__name__, str(error), place, name, failed)
    raise failure from None  # obstore's message may contain parts of a signature


def _error_for(
    kind: str, text: str, place: Location, name: str | None, failed: type[RemoteFailed]
) -> ShardprepError:
    """Return the error for one of obstore with this class; for a listing, only the status tells the kind."""
    status, line = _response_status(text), text.partition("\n")[0]
    at: dict[str, Any] = {"path": place.url, "shard": name}
    credentials = CREDENTIALS.get(place.scheme)
    reason = next((f"; {reason}" for code, reason in _REASONS.items() if code in status), "")
    if _WITHOUT_KEYS.search(line):
        return RemoteDenied(f"there are no credentials for it; set {credentials}", **at)
    if reason or kind in _DENIED or status.startswith((": 401", ": 403")):
        keys = f", and the credentials: {credentials}" if credentials else ""
        return RemoteDenied(f"denies access{status}{reason or f'; check its permissions{keys}'}", **at)
    is_missing = kind in ("FileNotFoundError", "NotFoundError") or status.startswith(": 404")
    if is_missing and "NoSuchUpload" not in status:
        if name is None or "NoSuchBucket" in status:
            return NothingThere(f"does not exist{status}; {LOOK}", path=place.url)
        return RemoteMissing(f"is not there{status}", **at)
    for number in FULL_DISK:
        if place.folder and f"(os error {number})" in line:
            return full_disk_error(place.folder / (name or ""), number)
    if place.folder and _NO_LINKS.search(line):
        advice = "give the URL of the bucket if it is a mounted one, or copy with prep fetch"
        return RemoteFailed(f"cannot be made: its file system may have no hard links; {advice}", **at)
    if NOWHERE in text:
        advice = f"if you trust that, name it in {REDIRECT_HOSTS} (host,host or *)"
        return RemoteFailed(f"redirects to another host; {advice}", **at)
    if kind == "NotSupportedError" or "non-partial response" in line:
        return RangeRefused("does not support range requests; download it, and use the copy", **at)
    if status.startswith(": 416") or "Requested range was invalid" in line:  # the latter for a local folder
        return RangeRefused(f"does not have that part of the file{status}", **at)
    if _OTHER_RANGE.search(line):
        return AnswerBroken(f"did not return the requested bytes; {AGAIN}", **at)
    may_pass = not (_REFUSED.match(status) or _LASTING.search(text))
    failure = failed(f"failed: {cause_of(text)}; {AGAIN if may_pass else LOOK}", **at)
    failure.may_pass = may_pass
    return failure


def cause_of(text: str) -> str:
    """Return a short cause for obstore's message: the status of the response, or what broke."""
    if status := _response_status(text):
        return status.removeprefix(": ")
    known = next((cause for sign, cause in _CAUSES.items() if sign in text), None)
    return known or redact(text.partition("\n")[0].rpartition(" - ")[2])


def _response_status(text: str) -> str:
    """Return the status of a server's response, with S3's error code; empty if there was no response."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is None:
        return ""
    return f": {status[1]}" + (f" ({code[1]})" if code else "")


@dataclass(frozen=True)
class StoredFile:
    """A stored file's size, and its ETag, which changes with its content, or the time of its last change."""

    size: int
    e_tag: str

    @classmethod
    def of(cls, meta: ObjectMeta) -> StoredFile:
        return cls(meta["size"], (meta["e_tag"] or meta["last_modified"].isoformat()).strip('"'))


CHUNK_BYTES = 1 << 20  # read from a response, hashed and written at once
MIN_BYTES = 1 << 12  # counts as progress; also the least to arrive within two timeouts
TRIES = 4  # without progress
WAIT_S, LONGEST_WAIT_S = 0.1, 10.0  # after the first try; then increasing
LISTING_S = 120.0  # for a whole listing, which a server could continue forever
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
SETTLE_S = 0.1
RETRY_TIME = timedelta(minutes=4)  # for one request, whose signature expires after 5 minutes
WHOLE_FILE = timedelta(days=1)  # the longest that one response takes

_inherited = False


def _note_fork() -> None:
    """Note in a forked process that obstore was imported before: its threads were not copied."""
    global _inherited
    _inherited = "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


@cache
def _settle_at_exit() -> None:
    """Let obstore's threads leave Python before it exits: one that hands over a result would abort it."""
    atexit.register(time.sleep, SETTLE_S)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed request is retried, and after how many seconds without a byte it fails."""

    retries: int
    timeout_s: float

    def __post_init__(self) -> None:
        check_int(self.retries, "retries", least=0)
        seconds = check_seconds(self.timeout_s, "timeout_s", above=0)
        object.__setattr__(self, "timeout_s", min(seconds, WHOLE_FILE.total_seconds()))


PATIENT = RetryPolicy(retries=10, timeout_s=30.0)  # for reading


class RemoteFolder(Owner):
    """A folder in any kind of store, read and, if ``writable``, written.

    Credentials are found as the store's own tools find them: in environment variables, files that these
    name, keys of a profile in ``~/.aws``, and a cloud machine's metadata service. Writes are atomic; a
    ``writable`` folder on this machine is created if it is missing, and its files are flushed. Only for the
    process that made it.

    Raises MissingExtra if obstore is not installed; UsageError in a process that was forked after obstore was
    imported, which would hang; NothingThere for a missing folder on this machine; RemoteFailed, RemoteDenied.
    """

    def __init__(self, place: Location, policy: RetryPolicy, *, writable: bool = False) -> None:
        self.place = place
        self._policy, self._is_writable = policy, writable
        self._store = self._open_store(policy.retries)
        # obstore also resumes a response that breaks off, after increasing pauses
        self._stream_store = self._open_store(min(1, policy.retries))

    def _open_store(self, retries: int) -> ObjectStore:
        if _inherited:
            raise UsageError(
                "obstore does not work in a process that was forked from one that had imported it; start it "
                "with multiprocessing's 'spawn'"
            )
        try:
            import obstore  # start-up time, and the package is an extra
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise MissingExtra.of("access to it", "obstore", "remote", path=self.place.url) from error
        self._obstore = obstore
        _settle_at_exit()
        if (folder := self.place.folder) is not None:
            if self._is_writable:
                folder.mkdir(parents=True, exist_ok=True)  # obstore's errors lack the path
            elif not folder.is_dir():
                raise NothingThere("there is no such folder", path=self.place.url)
            with translate_errors(self.place):
                return LocalStore(folder, automatic_cleanup=self._is_writable)
        config: Any = profile_config() if self.place.scheme == "s3" else {}
        if self._is_writable and self.place.scheme == "s3":
            # not every S3-compatible store supports the request that deletes many files
            config["disable_bulk_delete"] = True
        server = urlsplit(_endpoint() if self.place.scheme == "s3" else self.place.url)
        is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        client: ClientConfig = {
            **_redirects_of(self.place, server),
            "allow_http": self.place.scheme == "http" or is_allowed or server.hostname in LOOPBACK,
            "timeout": WHOLE_FILE,
            "read_timeout": timedelta(seconds=self._policy.timeout_s),
            "connect_timeout": timedelta(seconds=self._policy.timeout_s),
        }
        first, longest = timedelta(seconds=WAIT_S), timedelta(seconds=LONGEST_WAIT_S)
        # each pause is random, up to 5 times the one before: with 2, they would not grow
        backoff: Any = {"init_backoff": first, "max_backoff": longest, "base": 5}
        retry: Any = {"max_retries": retries, "retry_timeout": RETRY_TIME, "backoff": backoff}
        with translate_errors(self.place):
            return from_url(self.place.url, config=config, client_options=client, retry_config=retry)

    async def read(
        self, name: str, start: int = 0, stop: int | None = None, *, only: StoredFile | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file from byte ``start``, to ``stop`` or the end, in chunks of about CHUNK_BYTES or less.

        Without ``stop``, a response decides where the file ends. Failed requests are retried as the policy
        says. A response that breaks off, has a wrong length or file, or brings too little within two
        timeouts is resumed from its last chunk, as long as one of TRIES brings MIN_BYTES.

        Raises AnswerBroken after that, or OtherFile if the file is not ``only``; RangeRefused if a range is
        requested and the server sends only whole files, or the file is shorter; RemoteMissing, RemoteDenied;
        and RemoteFailed for anything else, after the retries.
        """
        import asyncio  # start-up time

        fruitless, is_coarse = 0, True
        while True:
            first, failure = start, None
            try:
                response = self._read_response(name, start, stop, only, is_coarse=is_coarse)
                async with aclosing(response):
                    async for chunk in response:
                        start += len(chunk)
                        yield chunk
            except RemoteFailed as error:
                if not error.may_pass:
                    raise
                failure = error
            if failure is None or start == stop:
                return
            fruitless = 0 if start - first >= MIN_BYTES else fruitless + 1
            if isinstance(failure, AnswerBroken):
                is_coarse, tries, wait_s = False, TRIES, WAIT_S * fruitless
            else:  # each of two requests
                tries, wait_s = 1 + self._policy.retries // 2, min(LONGEST_WAIT_S, WAIT_S * 4**fruitless)
            if fruitless >= tries:
                raise failure
            await asyncio.sleep(wait_s)

    async def _read_response(
        self, name: str, start: int, stop: int | None, only: StoredFile | None, *, is_coarse: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of one response as they arrive, or if ``is_coarse``, faster, in whole chunks."""
        import asyncio  # start-up time

        at: dict[str, Any] = {"path": self.place.url, "shard": name}
        options: GetOptions | None = None
        if stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}
        with translate_errors(self.place, name):
            response = await self._obstore.get_async(self._stream_store, name, options=options)
        if only not in (None, StoredFile.of(response.meta)):
            raise OtherFile("is not the same file as before", **at)
        arrived, left_s = 0, 2 * self._policy.timeout_s
        chunks = aiter(response.stream(min_chunk_size=CHUNK_BYTES if is_coarse else 1))
        while start != stop:
            asked = time.monotonic()
            try:
                with translate_errors(self.place, name, AnswerBroken):
                    async with asyncio.timeout(left_s):
                        chunk = bytes(await anext(chunks))
            except StopAsyncIteration:
                break
            except TimeoutError as error:
                raise AnswerBroken(
                    f"failed: only {arrived:,} bytes arrived in {2 * self._policy.timeout_s:g} s; {AGAIN}",
                    **at,
                ) from error
            start += len(chunk)
            if stop is not None and start > stop:
                break
            yield chunk
            arrived, left_s = arrived + len(chunk), left_s - (time.monotonic() - asked)
            if arrived >= MIN_BYTES:
                arrived, left_s = 0, 2 * self._policy.timeout_s
        if stop not in (None, start):
            raise AnswerBroken(f"did not return the requested bytes; {AGAIN}", **at)

    async def metadata(self, name: str) -> StoredFile | None:
        """Return the store's metadata of a file, or None if it does not exist. Raises RemoteFailed."""
        try:
            with translate_errors(self.place, name):
                return StoredFile.of(await self._obstore.head_async(self._store, name))
        except RemoteMissing:
            return None

    async def list_files(self) -> dict[str, StoredFile | None]:
        """Return the store's metadata of each file in this folder, and None for each subfolder, as ``NAME/``.

        Empty for a web server. Raises RemoteDenied, RemoteFailed.
        """
        import asyncio  # start-up time

        if self.place.scheme in ("http", "https"):
            return {}
        try:
            with translate_errors(self.place):
                async with asyncio.timeout(LISTING_S):
                    listing = await self._obstore.list_with_delimiter_async(self._store)
        except TimeoutError as error:
            raise RemoteFailed(
                f"did not finish listing its files within {LISTING_S:g} s", path=self.place.url
            ) from error
        folders = [f"{prefix.rstrip('/').rpartition('/')[2]}/" for prefix in listing["common_prefixes"]]
        files = {each["path"].rpartition("/")[2]: StoredFile.of(each) for each in listing["objects"]}
        return {**dict.fromkeys(folders), **files}

    async def content(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of a file, or None if it does not exist. Raises RemoteFailed."""
        with suppress(RemoteMissing):
            return await self.first_bytes(name, most)
        return None

    async def first_bytes(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file. Raises the errors of :meth:`read`."""
        data = bytearray()
        async with aclosing(self.read(name)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) >= most:
                    break
        return bytes(data[:most])

    async def create(self, name: str, data: bytes, mode: Literal["create", "overwrite"] = "create") -> bool:
        """Write a file, with "create" only if there is none, and read it back.

        Return whether this call wrote it. Raises RemoteDamaged if it is wrong TRIES times.
        """
        for _ in range(TRIES):
            with translate_errors(self.place, name):
                try:
                    await self._obstore.put_async(self._store, name, data, mode=mode)
                except self._obstore.exceptions.AlreadyExistsError:
                    return False
            await self._flush(name)
            if await self.content(name, len(data) + 1) == data:
                return True
            mode = "overwrite"
        raise self.not_kept_error(name)

    def not_kept_error(self, name: str) -> RemoteDamaged:
        """Return the error for a file that was written TRIES times and never right."""
        return RemoteDamaged(
            f"does not hold the bytes that were sent, {TRIES} times in a row; check the network between here "
            "and the store",
            path=self.place.url,
            shard=name,
        )

    async def write(self, name: str, parts: AsyncGenerator[bytes, None], size: int) -> None:
        """Write a file of ``size`` bytes, replacing an existing one.

        Each of its ``parts`` except the last is :func:`part_bytes` long.
        """
        bytes_of_part = part_bytes(size)
        with translate_errors(self.place, name):
            async with aclosing(parts):
                if size <= bytes_of_part:
                    whole = b"".join([part async for part in parts])
                    await self._obstore.put_async(self._store, name, whole, use_multipart=False)
                else:
                    await self._obstore.put_async(
                        self._store, name, parts, chunk_size=bytes_of_part, max_concurrency=PARTS_AT_ONCE
                    )
        await self._flush(name)

    async def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(RemoteMissing), translate_errors(self.place, name):
            await self._obstore.delete_async(self._store, name)

    async def _flush(self, name: str) -> None:
        from shardprep.formats.runtime.loop_thread import call_in_thread  # start-up time: asyncio

        if (folder := self.place.folder) is not None:
            for path in (folder / name, (folder / name).parent):
                await call_in_thread(flush_file, path)


MEBIBYTE = 1 << 20
PART_BYTES = 8 * MEBIBYTE  # of a multipart upload: a slow line sends one part within the timeout
MAX_PARTS = 10_000  # of one file, S3's limit
PARTS_AT_ONCE = 2  # of each file; several files are sent at once


def part_bytes(size: int) -> int:
    """Return the part size for uploading a file of ``size`` bytes; the last part may be smaller.

    >>> part_bytes(1 << 30) >> 20, part_bytes(200 << 30) >> 20
    (8, 21)
    """
    return max(PART_BYTES, -(-size // (MAX_PARTS * MEBIBYTE)) * MEBIBYTE)


def _redirects_of(place: Location, server: SplitResult) -> ClientConfig:
    """Return settings that block redirects to other hosts, by a proxy for these that does not exist.

    REDIRECT_HOSTS in the environment names allowed hosts, or ``*``. Redirects are not blocked behind a proxy
    in the environment, nor for AWS, Google and Azure, whose credentials come from other hosts.
    """
    from urllib.request import getproxies, proxy_bypass  # start-up time

    host, allowed = server.hostname or "", os.environ.get(REDIRECT_HOSTS, "").strip()
    # keys for S3 in the environment: no service is asked for them
    has_keys = any(map(os.environ.get, ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")))
    is_own = server.scheme in ("http", "https") and (place.scheme != "s3" or has_keys)
    has_proxy = {server.scheme, "all"} & getproxies().keys() and not proxy_bypass(host)
    if not is_own or allowed == "*" or has_proxy:
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(filter(None, (host, allowed)))}


def _endpoint() -> str:
    """Return the S3 endpoint that the environment names; empty for AWS. Raises UsageError if it is no URL."""
    name = next((name for name in ENDPOINTS if name in os.environ), None)
    if name is None:
        return ""
    url = os.environ[name]
    if not url.startswith(("http://", "https://")) or not _host_of(url):
        raise UsageError(f"{name} is {redact(url)!r}, not a URL such as https://host:9000; set or unset it")
    return url
