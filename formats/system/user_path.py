"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path; a ``~`` or ``~name`` at its beginning is that user's home folder.

    Where there is no such user, the path is taken as it is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
