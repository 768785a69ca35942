"""What a client of object storage reports, as errors of this package that hold no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardprep.formats.errors import DataError, OperationError, ShardprepError

from .location import Location, redacted


class RemoteMissing(DataError):
    """A file is not in the bucket or on the server where it should be."""


class RemoteFailed(OperationError):
    """A bucket or a server does not answer, or refuses to."""


class RemoteDenied(RemoteFailed):
    """A bucket or a server gives no access."""


class AnswerBroken(RemoteFailed):
    """An answer began, and stopped or broke off before its end."""


class RangeRefused(RemoteFailed):
    """A server sends no part of a file, only the whole."""


CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket; AWS_REGION "
    "and AWS_ENDPOINT_URL say where the bucket is",
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
AGAIN = "run the same command again, which goes on from there"
LOOK = "look at the URL, and at the region and the endpoint in the environment"
_NO_RANGE = "Requested range was invalid"  # of a folder on this machine
_REFUSED = re.compile(r": (3|4(?!08|29))")
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z'-]*(?: [A-Za-z'-]+)*)?)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CAUSES = {
    "TimedOut": "no bytes came for longer than the timeout",
    "kind: Timeout": "no bytes came for longer than the timeout",
    "dns error": "there is no host of that name",
    "kind: Connect": "no connection",
    "IncompleteBody": "the answer ended before its end",
    "IncompleteMessage": "the answer ended before its end",
    "kind: Interrupted": "the answer ended before its end",
    "ConnectionReset": "the connection broke",
    "builder error": "http:// without TLS, which AWS_ALLOW_HTTP=true allows",
}


@contextmanager
def translated(
    place: Location, name: str | None = None, failed: type[RemoteFailed] = RemoteFailed
) -> Iterator[None]:
    """Raise errors of obstore as those of this package, for the file ``name`` of a place.

    Raises RemoteMissing, RemoteDenied, RangeRefused, and ``failed`` for anything else.
    """
    from obstore import exceptions  # start-up time, and the package is an extra

    failure: ShardprepError
    try:
        yield
        return
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        failure = _missing(_answer(str(error)), place, name)
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        failure = RemoteDenied(
            f"gives no access{_answer(str(error))}{_advice(place)}", path=place.url, shard=name
        )
    except exceptions.NotSupportedError:
        failure = RangeRefused("sends no parts of files", path=place.url, shard=name)
    except exceptions.BaseError as error:
        failure = _failed(str(error), place, name, failed)
    raise failure  # outside of the handlers: what obstore says can hold parts of a signature


def _missing(status: str, place: Location, name: str | None) -> RemoteMissing:
    return RemoteMissing(f"is not there{status}", path=place.url, shard=name)


def _failed(text: str, place: Location, name: str | None, failed: type[RemoteFailed]) -> ShardprepError:
    status, said = _answer(text), text.partition("\n")[0]
    if any(sign in said for sign in _CREDENTIAL_SIGNS):
        return RemoteDenied(f"there are no credentials for it{_advice(place)}", path=place.url, shard=name)
    if status.startswith(": 404"):  # of a listing
        return _missing(status, place, name)
    if "non-partial response" in said:
        return RangeRefused("sends no parts of files", path=place.url, shard=name)
    if status.startswith(": 416") or _NO_RANGE in said:
        return RangeRefused(f"has not that part of the file{status}", path=place.url, shard=name)
    advice = LOOK if _REFUSED.match(status) or "region" in said else AGAIN
    return failed(f"failed: {cause_of(text)}; {advice}", path=place.url, shard=name)


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
    return f"; set {advice}" if advice else "; look at its permissions"
