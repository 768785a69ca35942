"""Closing an object that other threads wait for, also from a garbage collection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOCK_TIMEOUT_S = 5.0  # the longest wait for the lock, which other threads hold for short times only


@contextmanager
def lock_for_closing(changed: threading.Condition) -> Iterator[bool]:
    """Hold the condition's lock, then wake all waiting threads. The context's value is whether it is held.

    A garbage collection may close an input in any thread, at any point. The wait for the lock is limited,
    because the thread that holds the lock may wait for something that this thread holds.
    """
    is_held = changed.acquire(timeout=LOCK_TIMEOUT_S)
    try:
        yield is_held
    finally:
        if is_held:
            changed.notify_all()
            changed.release()
