"""The boundary around each reader of untrusted files: its exceptions become errors of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardprep.formats.errors import ShardprepError, SourceDamaged

PASSING = (ShardprepError, OSError, MemoryError)
"""Errors that pass unchanged. A MemoryError is the system's: readers bound every size before its use."""


def _nowhere() -> str:
    return ""


@contextmanager
def foreign_file(
    path: str | os.PathLike[str],
    advice: str,
    *,
    key: str | None = None,
    place: Callable[[], str] = _nowhere,
) -> Iterator[None]:
    """Raise SourceDamaged for any Exception but those of PASSING, with that as its cause.

    ``path``, ``key`` and ``place()``, which begins the message, name the place; ``advice`` is what to do. The
    text of a ValueError is used as the message; for other exceptions the class is named. Thread-safe; one
    context is for one use.
    """
    try:
        yield
    except PASSING:
        raise
    except Exception as error:  # hostile bytes may cause any exception; it stays visible as the cause
        raise SourceDamaged(f"{place()}{reason_of(error)}; {advice}", path=path, key=key) from error


def reason_of(error: Exception) -> str:
    """Return a reader's exception as a message about its file."""
    if isinstance(error, ValueError):
        return str(error)
    return f"it cannot be read ({type(error).__name__}: {error})"
