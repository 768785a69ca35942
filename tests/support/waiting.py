"""Waiting for another thread or process, and interruptions."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest


def until(condition: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    """Wait until the condition is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Let Ctrl-C arrive when this function of a class or module has been called."""
    function = getattr(owner, name)

    def interrupted(*given: Any, **options: Any) -> None:
        monkeypatch.undo()
        function(*given, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, name, interrupted)
