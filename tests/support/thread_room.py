"""A system that has no room for another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NO_ROOM = 1 << 46  # bytes; a stack for which no thread finds addresses


@contextmanager
def no_room() -> Iterator[None]:
    """Make the system refuse every new thread of this process within the context."""
    before = threading.stack_size(NO_ROOM)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)
