"""Places in object storage and on servers, as URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shardprep.formats.errors import UsageError
from shardprep.formats.system.user_path import user_path

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|[?#][^\s\"')>]*")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in object storage, on a server or on this machine: a URL without secrets and last ``/``."""

    url: str

    @classmethod
    def parse(cls, url: str) -> Location:
        """Return the place of a URL that a user gives. Raises UsageError, which shows no secret."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            raise UsageError(f"is not a URL with one of {', '.join(SCHEMES)}{_hint(url)}", path=redacted(url))
        if redacted(url) != url:
            raise UsageError(
                "has a user, a query or a fragment; give the URL without, and credentials in the environment",
                path=redacted(url),
            )
        if not rest.strip("/") or (scheme == "file") != rest.startswith("/"):
            wanted = "file:///FOLDER" if scheme == "file" else f"{scheme}://PLACE/FOLDER"
            raise UsageError(f"is not a URL such as {wanted}", path=url)
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


def redacted(text: str) -> str:
    """Return a text in which users, queries and fragments of URLs are left out.

    >>> redacted("GET https://me:secret@host/train?sig=secret failed")
    'GET https://…@host/train?… failed'
    """
    return _SECRETS.sub(lambda found: f"{found[0][0]}…" if found[0][0] in "?#" else "…@", text)


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is this machine."""
    return urlsplit(url).hostname in LOOPBACK


def _hint(url: str) -> str:
    return "" if "://" in url else "; a folder of this machine is file:// and its whole path"
