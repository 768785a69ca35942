"""A resource that one thread at a time uses, and that any thread may close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import socket, socketpair

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned

CLOSE_TIMEOUT_S = 5.0  # for which close() waits until the using thread has stopped


class ExclusiveUse(Owned):
    """A guard that calls ``release`` once: in :meth:`close`, or at the end of the use under way.

    A thread that waits during its use also waits for :attr:`woken`, and then calls :meth:`check_open`.
    ``name`` is the name of the resource in errors.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name = name
        self._release_resource = release
        self._closed = False
        self._using = threading.Lock()
        self._user: int | None = None
        self._released = threading.Event()
        self._woken, self._waker = socketpair()

    @property
    def woken(self) -> socket:
        """A socket that can be read once this is closed."""
        return self._woken

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the resource. Raises UsageError where this is closed, or another thread holds it."""
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
        """Raise UsageError where this is closed."""
        if self._closed:
            raise UsageError(f"this {self._name} is closed; make a new one")

    def close(self) -> None:
        """Wake the using thread, and wait for it at most CLOSE_TIMEOUT_S. Idempotent; from any thread.

        Does nothing in a forked copy of the process: its sockets would wake a thread of the original.
        """
        if not self.made_here:
            return
        self._closed = True
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._release()
        if self._user != threading.get_ident():
            self._released.wait(CLOSE_TIMEOUT_S)

    def _release(self) -> None:
        if self._using.acquire(blocking=False):  # never released again
            self._release_resource()
            self._woken.close()
            self._waker.close()
            self._released.set()
