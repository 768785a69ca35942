"""Paths as users give them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardprep.formats.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path; a ``~`` or ``~name`` at its beginning is that user's home folder.

    Where there is no such user, the path is taken as it is. Raises UsageError for the text of a URL, which
    would be the path of another place.
    """
    if isinstance(path, str) and (url := _URL.match(path)):  # the rest may hold a secret
        raise UsageError(f"a path on this machine is needed here, not a URL that begins with {url[0]}")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
