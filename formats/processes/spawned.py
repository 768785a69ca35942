"""A process that this one spawns: its start, its exit, and its exit code."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from types import MappingProxyType
from typing import Any

from shardprep.formats.system.owned import Owned

from .channel import Channel
from .process_exit import end_with_parent, exists, exit_descriptor
from .process_start import SPAWN, import_main, open_streams, starting_process

# Between two checks of a process, on systems without pidfd.
POLL_INTERVAL_S = 0.2
# The time for another thread that reaped a process to store its exit code.
REAP_TIMEOUT_S = 0.2

_started: weakref.WeakSet[SpawnProcess] = weakref.WeakSet()


def _forget_started() -> None:
    """In a forked copy, remove the children, which multiprocessing otherwise ends when the copy exits."""
    for process in _started:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_started)


class SpawnedProcess(Owned):
    """A process that calls ``target(channel, begin, **given)``, and this end of that channel.

    The target first calls ``begin()``, which makes the process end when this one does, and imports the main
    module. It raises what the import raises, and OperationError if the system allows no further thread.

    The kernel reports whether the process still runs, not the end of a pipe or socket: multiprocessing's
    sentinel and the channel stay open while a process lives that the child forked, or that this process
    forked while it started the child.

    The process uses only an unnamed pair of sockets, so nothing is left behind when either process ends.
    SIGINT is ignored in it from its first instruction on: Ctrl-C reaches all processes of a terminal, and
    would give a traceback in one that is still importing. It imports the main module only if ``main`` is
    given, because a user's script would run again in it. One thread uses this object; :meth:`kill` may be
    called from any thread. In a forked copy of the starting process it does nothing.

    ``wanted`` is called from time to time while another thread starts a process. Raises OperationError if it
    returns false, and if the system allows no further process. Descriptors 0 to 2 are opened on /dev/null if
    the program has closed them, and stay open.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *,
        name: str | None = None,
        main: Mapping[str, str] = MappingProxyType({}),
        wanted: Callable[[], bool] = lambda: True,
        **given: Any,
    ) -> None:
        open_streams()
        parent_end, child_end = socket.socketpair()
        self.channel = Channel(parent_end)
        self.exit_code: int | None = None
        self._has_ended = False
        try:
            with child_end, starting_process(wanted):
                arguments = (os.getpid(), child_end, dict(main), target, given)
                self._process = SPAWN.Process(target=_run_child, args=arguments, name=name, daemon=True)
                self._process.start()
                self._exit = exit_descriptor(self.pid)
        except BaseException:
            self.channel.close()
            raise
        _started.add(self._process)

    @property
    def pid(self) -> int:
        """The process's number, which the system may reuse after its end."""
        return self._process.pid or 0

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has exited; -1 without pidfd."""
        return self._exit.fileno()

    def has_exited(self) -> bool:
        """Whether the process has exited, without waiting."""
        if self._has_ended:
            return True
        if self.fileno() >= 0:
            return self._poll(select.poll(), 0.0)
        return self._process.exitcode is not None or not exists(self.pid)

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for the exit; return whether the process has exited."""
        until = time.monotonic() + seconds
        while not self.has_exited():
            if (left := until - time.monotonic()) <= 0:
                return False
            self._poll(select.poll(), left)
        return True

    def wait_for_news(self, seconds: float, *, to_send: bool = False) -> None:
        """Wait for a message, the exit, or with ``to_send`` space in the channel; may return without any."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN | (select.POLLOUT if to_send else 0))
        self._poll(poller, seconds)

    def _poll(self, poller: select.poll, seconds: float) -> bool:
        """Wait for the poller's events or the exit; return whether there was any."""
        if self.fileno() >= 0:
            poller.register(self, select.POLLIN)
        else:
            seconds = min(seconds, POLL_INTERVAL_S)
        return bool(poller.poll(None if seconds == math.inf else math.ceil(seconds * 1000)))

    def kill(self) -> None:
        """Kill the process at once."""
        if self.made_here:
            with suppress(ValueError):  # the process object is closed
                self._process.kill()

    def end(self, timeout_s: float) -> int | None:
        """Wait ``timeout_s`` seconds for the exit, else kill; return the exit code, negative for a signal.

        Returns None if the program itself has reaped the process, or in a forked copy. After this call the
        process no longer writes to shared memory, and the channel is closed. Idempotent.
        """
        if self.made_here and not self._has_ended:
            if not self.wait(timeout_s):
                self._process.kill()
                self.wait(math.inf)
            self.exit_code = self._reaped()
            self._has_ended = True
            self._exit.close()
            self.channel.close()
        return self.exit_code

    def _reaped(self) -> int | None:
        """Return the exit code; if another thread has reaped the process, it is there a moment later."""
        until = time.monotonic() + REAP_TIMEOUT_S
        while (code := self._process.exitcode) is None and time.monotonic() < until:
            time.sleep(0.001)
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        with suppress(ValueError):  # if the program has reaped it, multiprocessing believes that it runs
            self._process.close()
        return code


def _run_child(
    parent: int,
    end: socket.socket,
    main: Mapping[str, str],
    target: Callable[..., None],
    given: dict[str, Any],
) -> None:
    """Run the target in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel = Channel(end)

    def begin() -> None:
        end_with_parent(parent, end.fileno())
        import_main(main)  # last, because it may hang, and the parent's end must be noticed

    try:
        target(channel, begin, **given)
    finally:
        end.detach()  # the connection ends with the process, not earlier
