"""Waiting for another thread or process."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Wait until the condition is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)
