"""The start of a thread, which the system may not allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardprep.formats.errors import OperationError

CANNOT_START = "can't start new thread"  # CPython's message for any reason of the system


@contextmanager
def starting_thread() -> Iterator[None]:
    """The context for starting a thread or using an executor. Raises OperationError if no thread starts."""
    try:
        yield
    except RuntimeError as error:
        if CANNOT_START not in str(error):
            raise
        raise OperationError(
            "the system has no room for another thread of this process: raise the limit (ulimit -u, ulimit -v, or "
            "pids.max of its control group), or use fewer workers and threads"
        ) from error
