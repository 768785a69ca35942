"""Processes that this one spawns: their start, the channel to them, and their exit.

Workers of loaders and the children of :mod:`shardprep.formats.runtime.workers` are started here.

The exit of another process, as the kernel reports it, not as the end of a pipe to it. A pipe or socket stays
open while any process has it, for example one that the process forked.
"""

from __future__ import annotations

import ctypes
import io
import math
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data, prepare
from types import FunctionType, MappingProxyType
from typing import Any

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owned import Descriptor, Owned, starting_thread

SPAWN = multiprocessing.get_context("spawn")

START_POLL_INTERVAL_S = 0.05  # between two calls of ``wanted`` while another thread starts a process

# A start changes the main module's attributes, which a child reads. And multiprocessing reaps finished
# children whenever it starts one: two threads that do so at once take the exit code from each other.
_start_lock = threading.Lock()

_is_importing_main = False

_hidden: dict[str, Any] | None = None  # attributes of the main module that are hidden now


def _free_in_copy() -> None:
    """Unlock starts in a forked copy of this process, where the thread that started one is missing."""
    global _start_lock
    _start_lock = threading.Lock()
    _show_main_module()


os.register_at_fork(after_in_child=_free_in_copy)


@contextmanager
def starting_process(wanted: Callable[[], bool]) -> Iterator[None]:
    """The context in which a process is spawned, one thread at a time.

    The child does not import the main module, and SIGINT is blocked in it from its first instruction on.
    Raises OperationError if the system allows no further process, or if ``wanted()`` becomes false while
    another thread starts one, and UsageError while a child imports the main module.
    """
    refuse_in_main_import()
    lock = _start_lock
    while not lock.acquire(timeout=START_POLL_INTERVAL_S):
        if not wanted():
            raise OperationError("the process to start is no longer needed")
    try:
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        with _sigint_blocked(), _main_module_hidden(), _with_children():
            yield
    except BlockingIOError as error:
        raise OperationError(
            "the system allows no further process: raise the limit (ulimit -u, or pids.max of the control group), "
            "or use fewer workers"
        ) from error
    finally:
        lock.release()


def open_streams() -> None:
    """Open descriptors 0 to 2 on /dev/null if the program closed them.

    Otherwise the next descriptors get these numbers: a child closes its channel as its stdin, libraries
    write their warnings into files, and multiprocessing fails.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # os.open takes the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def main_module() -> dict[str, str]:
    """Return the place of this process's main module, for :func:`import_main` in a child."""
    with _start_lock:  # a start in another thread hides it
        given = get_preparation_data("")
    return {name: value for name, value in given.items() if name.startswith("init_main")}


def import_main(main: Mapping[str, str]) -> None:
    """Import the parent's main module, if one is given, as ``__main__`` of this process."""
    global _is_importing_main
    _is_importing_main = True
    prepare(dict(main))
    _is_importing_main = False


def refuse_in_main_import() -> None:
    """Raise UsageError in a child that imports a main module without a guard, which starts processes."""
    if _is_importing_main:
        raise UsageError(
            "a worker process imports the main script, which must not start processes while it is "
            'imported: put everything except definitions under `if __name__ == "__main__":`'
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _with_children() -> Iterator[None]:
    """Allow children of a daemonic process, such as a worker of Dask: these end when it does."""
    this = multiprocessing.current_process()
    was_daemonic = this.daemon
    try:
        this.daemon = False
        yield
    finally:
        this.daemon = was_daemonic


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    global _hidden
    names = vars(sys.modules["__main__"])
    _hidden = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    try:
        names.update(__file__=None, __spec__=None)
        yield
    finally:
        _show_main_module()


def _show_main_module() -> None:
    global _hidden
    known, _hidden = _hidden, None
    if known is not None:
        names = vars(sys.modules["__main__"])
        for name in ("__file__", "__spec__"):
            names.pop(name, None)
        names.update(known)


PARENT_POLL_MS = 1000  # between two checks of the parent, on systems without pidfd


def exit_descriptor(pid: int) -> Descriptor:
    """Return a pidfd, which is readable once the process has exited; a closed descriptor without pidfd."""
    try:
        return Descriptor(os.pidfd_open(pid))
    except (AttributeError, OSError):  # not Linux, too old, forbidden; or the process was reaped
        return Descriptor(-1)


def exists(pid: int) -> bool:
    """Whether the process exists, including one that has exited and was not reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_with_parent(parent: int, connection: int) -> None:
    """Start a daemon thread that ends this process once its parent has exited or closed the connection.

    ``connection`` is the descriptor of a socket to the parent. PR_SET_PDEATHSIG is about the thread that
    started this process, not about the parent. Raises OperationError if the system allows no further thread.
    """
    thread = threading.Thread(target=_watch, args=(parent, connection), name="shardprep-parent", daemon=True)
    with starting_thread():
        thread.start()


def _watch(parent: int, connection: int) -> None:
    poller = select.poll()
    poller.register(connection, 0)  # without events, only POLLHUP and errors are reported
    exited = exit_descriptor(parent)
    if exited.fileno() >= 0:
        poller.register(exited, select.POLLIN)
    # checked after pidfd_open: if the parent had exited, its number may be another process's
    while os.getppid() == parent and not poller.poll(PARENT_POLL_MS):
        pass
    os._exit(1)


Part = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel(Owned):
    """Whole messages over one end of a socket pair; another process has the other end.

    If the sender is killed or stopped in the middle of a message, no part of it is received, and no other
    channel is blocked. The pair has no name, so no other program can open it, and nothing can be left
    behind. An open channel does not mean that the other process runs: a process that either of the two
    forked keeps it open. Not thread-safe.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray()
        self._unsent = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once it is closed."""
        return self._end.fileno()

    def send(self, *parts: Part) -> None:
        """Send the parts as one message, and wait until it is sent. Raises OSError at a closed other end."""
        self._end.sendall(_joined(parts), _NO_SIGNAL)

    def post(self, *parts: Part) -> None:
        """Queue the parts as one message, which :meth:`flush` sends."""
        self._unsent += _joined(parts)

    def flush(self) -> bool:
        """Send queued bytes without waiting; return whether all are sent. Raises OSError as ``send`` does."""
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self._end.send(self._unsent, socket.MSG_DONTWAIT | _NO_SIGNAL)
                del self._unsent[:sent]
        return not self._unsent

    def receive(self) -> bytes | None:
        """Wait for the next message and return it; None if the other end is closed."""
        while (message := self._next()) is None:
            if not self._read(0):
                return None
        return message

    def arrived(self) -> Iterator[bytes]:
        """Yield the received messages without waiting; ``ended`` is whether no more can come."""
        with suppress(BlockingIOError):
            while self._read(socket.MSG_DONTWAIT):
                while (message := self._next()) is not None:
                    yield message

    def finish(self) -> None:
        """Stop sending: the other end receives everything sent so far, then the end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()

    def __del__(self) -> None:
        if self.made_here:
            self._end.close()
        else:
            self._end.detach()

    def _read(self, flags: int) -> bool:
        try:
            piece = self._end.recv(_PIECE, flags)
        except ConnectionResetError:  # the other process ended before it read everything
            piece = b""
        self._buffer += piece
        self.ended = not piece
        return not self.ended

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            message = bytes(view[_LENGTH.size : end])
        del self._buffer[:end]
        return message


def _joined(parts: tuple[Part, ...]) -> bytes:
    return b"".join((_LENGTH.pack(sum(len(part) for part in parts)), *parts))


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


MOST_BYTES = 4 << 20


class _TooLarge(Exception):
    """The object takes more than MOST_BYTES, or names what only the main module defines."""


def packed(value: object) -> bytes | None:
    """Return the bytes that :func:`unpacked` turns into the object again in a worker process.

    None for one that takes more than MOST_BYTES, cannot be pickled, or has classes or functions of the main
    module, which workers do not import.
    """
    file = _BoundedBuffer()
    try:
        _Packer(file).dump(value)
    except Exception:  # whatever its classes raise: it stays in this process
        return None
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the object of :func:`packed`, in a process of the same program."""
    return ForkingPickler.loads(data)


class _BoundedBuffer(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLarge
        return super().write(data)


class _Packer(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise _TooLarge
        return NotImplemented


def use_one_thread() -> None:
    """Have OpenCV and PyTorch compute in the calling thread only, where they were imported."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
MMAP_THRESHOLD_BYTES = 32 << 20


def keep_freed_memory(most: int = 64 << 20) -> None:
    """Make this process keep so much freed memory for reuse; without glibc nothing changes.

    If a decoded image is at the heap's end, freeing it shrinks the heap, and the next image causes up to 16
    page faults, 25 µs of CPU.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, most)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
