"""Something that one thread at a time uses, and that any thread may close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import socket, socketpair

from ..formats.errors import UsageError

PATIENCE = 5.0  # seconds that close() gives the thread whose turn it is to let go


class Turns:
    """``release`` is called once, by whoever comes last: he who closes, or he whose turn it was.

    Who waits during his turn waits for :attr:`woken`, too, and then calls :meth:`check_open`. ``name`` is for errors.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name = name
        self._release_it = release
        self._closed = False
        self._using = threading.Lock()
        self._user: int | None = None
        self._released = threading.Event()
        self._woken, self._waker = socketpair()

    @property
    def woken(self) -> socket:
        """Can be read once this is closed."""
        return self._woken

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises UsageError where this is closed, or it is another thread's turn."""
        self.check_open()
        if not self._using.acquire(blocking=False):
            self.check_open()
            raise UsageError(f"another thread draws from this {self._name}; use one {self._name} for each")
        self._user = threading.get_ident()
        try:
            self.check_open()
            yield
        finally:
            self._user = None
            self._using.release()
            if self._closed:
                self._release()

    def check_open(self) -> None:
        """Raises UsageError."""
        if self._closed:
            raise UsageError(f"this {self._name} is closed; make a new one")

    def close(self) -> None:
        """Wake whose turn it is, and wait a little until he has let go. Idempotent; from any thread."""
        self._closed = True
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._release()
        if self._user != threading.get_ident():
            self._released.wait(PATIENCE)

    def _release(self) -> None:
        if self._using.acquire(blocking=False):  # and for ever
            self._release_it()
            self._woken.close()
            self._waker.close()
            self._released.set()
