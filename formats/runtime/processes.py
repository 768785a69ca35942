"""Spawned processes: their start, the channel to them, and their exit.

They are the workers of loaders, and children that make calls, alone or as a pool, whose crash is an error of
its call. The kernel reports their exit: a socket, a pipe and multiprocessing's sentinel stay open while any
process has them, such as one that the child forked.
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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data, prepare
from pathlib import Path
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from shardprep.formats.errors import OperationError, ShardDamaged, UsageError, WorkerDied
from shardprep.formats.runtime import open_streams
from shardprep.formats.runtime.owners import Descriptor, Owner

SPAWN = multiprocessing.get_context("spawn")
MAX_WORKERS = 4096  # processes or threads of one call

# multiprocessing reaps finished children at every start: two threads that did so at once would take
# exit codes from each other.
_start_lock = threading.Lock()

NOTHING_STARTS = (
    "the system allows no further process or thread: raise the limit (ulimit -u or -v, or pids.max of the "
    "control group), or use fewer workers"
)

_is_importing_main = False
COMMANDS_OF_CHILDREN = ("--multiprocessing-fork", "from multiprocessing.")

SIGNALS_OF_PROGRAM = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals that Slurm's --signal, or a terminal that closes, sends to its children, too."""
_this_thread = threading.local()


def is_starting_process() -> bool:
    """Whether this thread starts a process, so that other threads cannot start or end one."""
    return bool(getattr(_this_thread, "is_starting", False))


@contextmanager
def starting_process() -> Iterator[None]:
    """The context in which to spawn a process, one thread at a time.

    The child does not import the main module, and has SIGINT and SIGNALS_OF_PROGRAM blocked from its first
    instruction. A daemonic process, such as a Dask worker, may have children, too; they end when it does.
    Raises OperationError if the system allows no further process, the current folder was deleted, or the
    child ends at once; UsageError in a child that is importing the main module.
    """
    refuse_in_main_import()
    this = multiprocessing.current_process()
    with _start_lock:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        was_daemonic, original = this.daemon, spawn.get_preparation_data
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_PROGRAM)
            resource_tracker.ensure_running()  # starting it later would unblock SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            this.daemon, spawn.get_preparation_data, _this_thread.is_starting = False, _preparation_data, True
            yield
        except BlockingIOError as error:
            raise OperationError(NOTHING_STARTS) from error
        except FileNotFoundError as error:  # of os.getcwd
            raise OperationError(
                "the current folder was deleted; change to another one (os.chdir)"
            ) from error
        except BrokenPipeError as error:
            raise OperationError(
                "a worker process ended as soon as it started; start the work again"
            ) from error
        finally:
            this.daemon, spawn.get_preparation_data, _this_thread.is_starting = was_daemonic, original, False
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _preparation_data(name: str) -> dict[str, Any]:
    """Let children that this thread starts not import the main module; those of other threads do.

    Nor are they told a start method that only this process knows, such as joblib's.
    """
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # Python before 3.13 lacks it within pdb
    data = get_preparation_data(name)
    if not is_starting_process():
        return data
    if data.get("start_method") not in multiprocessing.get_all_start_methods():
        data.pop("start_method", None)
    return {key: value for key, value in data.items() if not key.startswith(("init_main", "authkey"))}


def main_module() -> dict[str, str]:
    """Return where this process's main module is, for :func:`import_main` in a child."""
    data = _preparation_data("")
    return {name: value for name, value in data.items() if name.startswith("init_main")}


def import_main(main: Mapping[str, str]) -> None:
    """Import the parent's main module, if given, as this process's ``__main__``."""
    global _is_importing_main
    _is_importing_main = True
    prepare(dict(main))
    _is_importing_main = False


def refuse_in_main_import() -> None:
    """Raise UsageError in a child whose import of the main module starts processes, for lack of a guard.

    A child of a frozen program, as of PyInstaller, is the program itself until it calls ``freeze_support``.
    """
    if getattr(sys, "frozen", False) and any(word.startswith(COMMANDS_OF_CHILDREN) for word in sys.argv[1:]):
        raise UsageError(
            "this frozen program runs again in place of a worker process: begin its main script with "
            "multiprocessing.freeze_support()"
        )
    if _is_importing_main:
        raise UsageError(
            "a worker process imports the main script, which must not start processes while it is "
            'imported: put everything except definitions under `if __name__ == "__main__":`'
        )


def exit_descriptor(pid: int) -> Descriptor:
    """Return a descriptor that is readable once the child process has exited.

    This is a pidfd. Linux before 5.3 has none, some containers forbid it, and Python as uv and conda build it
    cannot open one: there, a thread waits for the exit.
    """
    try:
        return Descriptor(os.pidfd_open(pid))
    except (AttributeError, OSError):
        exited = Descriptor(os.eventfd(0, os.EFD_CLOEXEC))
        # The thread has a descriptor of its own, because this one may be closed while it waits.
        own = Descriptor(os.dup(exited.fileno()))
        threading.Thread(target=_report_exit, args=(pid, own), name="shardprep-exit", daemon=True).start()
        return exited


def _report_exit(pid: int, exited: Descriptor) -> None:
    with suppress(ChildProcessError):  # the program reaped it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.eventfd_write(exited.fileno(), 1)
    exited.close()


PARENT_POLL_MS = 1000  # between two checks of the parent, without pidfd


def _exit_with_parent(parent: int, connection: int) -> None:
    """End this process once its parent exits or closes the connection, the descriptor of a socket to it.

    PR_SET_PDEATHSIG would not do: it is tied to the thread that started this process.
    """
    poller = select.poll()
    poller.register(connection, 0)  # reports only POLLHUP and errors
    with suppress(AttributeError, OSError):
        poller.register(os.pidfd_open(parent), select.POLLIN)
    # Checked after pidfd_open: if the parent has exited, its number may belong to another process.
    while os.getppid() == parent and not poller.poll(PARENT_POLL_MS):
        pass
    os._exit(1)


Part = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18


class Channel(Owner):
    """One end of a socket pair, which exchanges whole messages with a process that has the other end.

    If the sender is killed or stopped in the middle of a message, no part of the message is received, and no
    other channel blocks. The pair has no name: no other program can open it, and nothing can be left behind.
    An open channel does not mean that the other process is still running. Not thread-safe.
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
        """Send the parts as one message, blocking. Raises OSError if the other end is closed."""
        self._end.setblocking(True)
        self._end.sendall(_encode_message(parts), socket.MSG_NOSIGNAL)

    def post(self, *parts: Part) -> None:
        """Queue the parts as one message for :meth:`flush`."""
        self._unsent += _encode_message(parts)

    def flush(self) -> bool:
        """Send queued messages without blocking; return whether all are sent. Raises OSError as ``send``."""
        self._end.setblocking(False)
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        return not self._unsent

    def receive(self) -> bytes | None:
        """Wait for the next message; return None if the other end is closed."""
        self._end.setblocking(True)
        while (message := self._next()) is None:
            if not self._read():
                return None
        return message

    def messages(self) -> Iterator[bytes]:
        """Yield the messages received so far, without blocking; set ``ended`` if no more can come."""
        self._end.setblocking(False)
        with suppress(BlockingIOError):
            while self._read():
                while (message := self._next()) is not None:
                    yield message

    def finish(self) -> None:
        """Stop sending: the other end still receives everything sent so far."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()

    def _read(self) -> bool:
        try:
            piece = self._end.recv(_PIECE)
        except ConnectionResetError:  # the other process ended before reading everything
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


def _encode_message(parts: tuple[Part, ...]) -> bytes:
    return b"".join((_LENGTH.pack(sum(len(part) for part in parts)), *parts))


_children: weakref.WeakSet[SpawnProcess] = weakref.WeakSet()


def _forget_children() -> None:
    """In a forked copy, forget the children, which multiprocessing would end when the copy exits.

    A start by another thread, which the copy lacks, would also keep the lock.
    """
    global _start_lock
    _start_lock = threading.Lock()
    for process in _children:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_children)


class SpawnedProcess(Owner):
    """A process that calls ``target(channel, **kwargs)``, and this process's end of the channel.

    The process ends when this one does. It does not import the main module, which would run a user's script
    again. The two share only an unnamed socket pair, so neither leaves anything behind. The child ignores
    SIGINT from its first instruction: Ctrl-C reaches all processes of a terminal, and would cause a traceback
    in one that is still importing. Not thread-safe, except for :meth:`kill`. Does nothing in a forked copy of
    this process. Raises OperationError if the system allows no further process.
    """

    def __init__(self, target: Callable[..., None], *, name: str | None = None, **kwargs: Any) -> None:
        open_streams()
        parent_end, child_end = socket.socketpair()
        # the program may have replaced socket.socket by a class of its own, as PySocks and pytest-socket do
        ForkingPickler.register(type(child_end), reduction._reduce_socket)  # type: ignore[attr-defined]
        self.channel = Channel(parent_end)
        self.exit_code: int | None = None
        self._has_ended = False
        args = (os.getpid(), child_end, target, kwargs)
        self._process = SPAWN.Process(target=_run_child, args=args, name=name, daemon=True)
        self._process.authkey = bytes(self._process.authkey)  # that of Celery's processes cannot be pickled
        try:
            with child_end, starting_process():
                self._process.start()
                self._exit = exit_descriptor(self.pid)
        except BaseException:
            self.channel.close()
            if self.pid:  # Ctrl-C during the start is raised after it
                self._process.kill()
                self._process.join()
            raise
        _children.add(self._process)

    @property
    def pid(self) -> int:
        """The process ID, which the system may reuse after the exit."""
        return self._process.pid or 0

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has exited; -1 after :meth:`end`."""
        return self._exit.fileno()

    def has_exited(self) -> bool:
        """Whether the process has exited; does not block."""
        return self._has_ended or self._poll(select.poll(), 0.0)

    def wait_for_news(self, seconds: float, *, to_send: bool = False) -> None:
        """Wait for a message, the exit, or, with ``to_send``, space in the channel. May return early."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN | (select.POLLOUT if to_send else 0))
        self._poll(poller, seconds)

    def _poll(self, poller: select.poll, seconds: float) -> bool:
        """Wait for the poller's events or the exit; return whether there was one."""
        poller.register(self, select.POLLIN)
        return bool(poller.poll(None if seconds == math.inf else math.ceil(seconds * 1000)))

    def kill(self) -> None:
        if self.was_made_here:
            with suppress(ValueError):  # the process object is closed
                if not self.has_exited():  # the number may belong to another process by now
                    self._process.kill()

    def end(self, timeout_s: float) -> int | None:
        """Wait ``timeout_s`` for the exit, then kill; return the exit code, negative for a signal.

        Returns None if the program itself reaped the process, or in a forked copy. After this call the
        process no longer writes to shared memory, and the channel is closed. Idempotent.
        """
        if self.was_made_here and not self._has_ended:
            if not self._poll(select.poll(), timeout_s):
                self._process.kill()
                self._poll(select.poll(), math.inf)
            with _start_lock:  # a start in another thread may be taking the exit code
                self.exit_code = self._process.exitcode
            multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
            with suppress(ValueError):  # multiprocessing thinks it runs if the program reaped it
                self._process.close()
            self._has_ended = True
            self._exit.close()
            self.channel.close()
        return self.exit_code


def _run_child(parent: int, end: socket.socket, target: Callable[..., None], kwargs: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = (parent, end.fileno())
    threading.Thread(target=_exit_with_parent, args=watch, name="shardprep-parent", daemon=True).start()
    try:
        target(Channel(end), **kwargs)
    finally:
        end.detach()  # the connection ends with the process, not earlier


MAX_BYTES = 4 << 20


def pickle_for_worker(value: object) -> bytes | None:
    """Pickle an object for ``ForkingPickler.loads`` in a worker process.

    Returns None if it takes more than MAX_BYTES, cannot be pickled, or names the main module, whose classes
    and functions workers do not import.
    """
    file = _BoundedBuffer()
    try:
        ForkingPickler(file).dump(value)
    except Exception:  # its classes may raise anything
        return None
    data = file.getvalue()
    return None if refers_to_main(data) else data


def refers_to_main(data: bytes) -> bool:
    """Whether a pickle refers to the main module, whose name may also be within a text, such as a path.

    In a child that multiprocessing spawned, that module is called ``__mp_main__``, also within pickled bytes.
    """
    if b"_main__" not in data:
        return False
    from pickletools import genops  # start-up time

    return any(
        b"__mp_main__" in value if isinstance(value, bytes) else value in ("__main__", "__mp_main__")
        for _, value, _ in genops(data)
    )


class _BoundedBuffer(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_BYTES:
            raise ValueError
        return super().write(data)


def use_one_thread() -> None:
    """Make OpenCV and PyTorch, if imported, compute in the calling thread only."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
MMAP_THRESHOLD_BYTES = 32 << 20


def keep_freed_memory(most: int = 64 << 20) -> None:
    """Make this process keep up to ``most`` bytes of freed memory for reuse. Needs glibc; else does nothing.

    Otherwise, freeing a decoded image at the end of the heap shrinks the heap, and the next image causes up
    to 16 page faults, 25 µs of CPU.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, most)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT_S = 120.0  # until a child is ready: imports from a slow network disk take a minute
EXIT_TIMEOUT_S = 1.0  # for a child that closed its channel
MAX_COUNTED_S = 1.0  # of a wait: all processes may have been stopped meanwhile, as by Ctrl-Z
KEPT_BYTES = 256 << 20  # of freed memory, reused for the next call's shard

# Signals of a library that crashes on a damaged file. Any other signal comes from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ChildDied(ShardDamaged):
    """The call crashed its process with ``signal``."""

    signal = ""


class ChildLost(OperationError):
    """The process of a call was killed, exited or timed out, which says nothing about the data."""


class Child(Owner, AbstractContextManager["Child"]):
    """A spawned process that makes picklable calls, one at a time.

    Not thread-safe, except for :meth:`kill`. Its exit is noticed even if a process it forked still runs. It
    ends when its parent does, and leaves nothing behind. Raises WorkerDied if it is not ready within
    START_TIMEOUT_S.
    """

    def __init__(self) -> None:
        self._is_ready = False
        self._process = SpawnedProcess(_serve)

    def call(self, seconds: float | None, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the call's result, or raise its error; ChildDied or ChildLost if the process ends.

        Raises ChildLost after ``seconds``, which begin once the process is ready; None waits without end.
        """
        if not self._is_ready:
            if self._receive_answer(START_TIMEOUT_S) is None:
                raise not_ready_error(START_TIMEOUT_S)
            self._is_ready = True
        self._process.channel.post(ForkingPickler.dumps((call, args, kwargs)))
        answer = self._receive_answer(math.inf if seconds is None else seconds)
        if answer is None:
            raise ChildLost(f"no answer within {seconds:.0f} seconds")
        failed, value = ForkingPickler.loads(answer)
        if failed:
            raise value
        return value  # type: ignore[no-any-return]

    def _receive_answer(self, seconds: float) -> bytes | None:
        """Return the next message, None on timeout. Raises ChildDied or ChildLost if the process ends."""
        process = self._process
        while True:
            has_exited = process.has_exited()  # checked first, so messages sent before the exit are received
            try:
                is_sent = process.channel.flush()
                for message in process.channel.messages():
                    return message
            except OSError:  # it closed the channel while the call was being sent
                has_exited = True
            if has_exited or process.channel.ended:
                raise self._exit_error()
            if seconds <= 0:
                return None
            began = monotonic()
            process.wait_for_news(min(MAX_COUNTED_S, seconds), to_send=not is_sent)
            seconds -= min(MAX_COUNTED_S, monotonic() - began)

    def _exit_error(self) -> ChildDied | ChildLost:
        code = self._process.end(EXIT_TIMEOUT_S)
        if code is None:
            return ChildLost(
                "the process that worked on it ended; the program itself has collected its exit code"
            )
        if -code in CRASHES:
            died = ChildDied(f"the library that reads it crashed ({signal.Signals(-code).name})")
            died.signal = signal.Signals(-code).name
            return died
        if code < 0:
            hint = " (out of memory? use fewer workers)" if -code == signal.SIGKILL else ""
            return ChildLost(f"the process that worked on it was killed by signal {-code}{hint}")
        return ChildLost(f"the process that worked on it exited with {code}")

    def kill(self) -> None:
        """Kill the process. Thread-safe."""
        self._process.kill()

    def __exit__(self, *exc: object) -> None:
        self._process.end(0)


def call_isolated(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call in a new process, like :meth:`Child.call`. Thread-safe."""
    with Child() as child:
        return child.call(seconds, call, *args, **kwargs)


def not_ready_error(seconds: float) -> WorkerDied:
    """Return the error for a process that did not become ready in time."""
    return WorkerDied(
        f"a worker process was not ready within {seconds:g} s, and was killed: check whether it hangs "
        "in an import (a network disk, a lock), is stopped (SIGSTOP, a debugger, a frozen control "
        "group) or lacks CPU or memory"
    )


def _serve(channel: Channel) -> None:
    """Run in the child: report that it is ready, then serve calls until the channel ends."""
    keep_freed_memory(KEPT_BYTES)
    answer: tuple[bool, Any] = (False, None)
    while True:
        try:
            channel.send(ForkingPickler.dumps(answer))
        except ConnectionError:  # the parent ended, perhaps while this process was stopped
            return
        if (question := channel.receive()) is None:
            return
        call, args, kwargs = ForkingPickler.loads(question)
        try:
            answer = (False, call(*args, **kwargs))
        except Exception as error:  # the parent raises it
            answer = (True, error)


GROUPS, GROUPS_FOLDER = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if it cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape").splitlines()
    return []


def group_limits(controller: str, files: Sequence[str], unified: str) -> Iterator[list[str]]:
    """Yield the words in the limits of this process's control group, and of those that contain it.

    ``files`` are the controller's in version 1, ``unified`` is its file in version 2. There may be no words.
    """
    for line in lines_of(GROUPS):
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            kind, names = (controller, files) if controllers else ("", [unified])
            inner = GROUPS_FOLDER / kind / group.lstrip("/")
            for folder in (inner, *inner.parents):
                yield [word for name in names for text in lines_of(folder / name) for word in text.split()]


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, also by the quota of a container."""
    cpus = len(os.sched_getaffinity(0))
    for words in group_limits("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"], "cpu.max"):
        if len(words) == 2 and words[0].isdecimal():  # not "max" or -1
            cpus = min(cpus, math.ceil(int(words[0]) / int(words[1])))
    return cpus


class WorkerPool(Owner, Executor):
    """A process pool whose processes may die at any time.

    The death of a process is an error (ChildDied, ChildLost) of its own call only, and the process is
    replaced; one thread waits for each process. In the standard library's pool, one death fails all calls
    without saying which call caused it, and killing the pool leaves semaphores in /dev/shm.

    A process that is not ready within START_TIMEOUT_S raises WorkerDied. Leaving the context with an
    error (Ctrl-C, a failed job) kills all processes. Raises OperationError if the system allows no further
    process.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, "shardprep-pool")
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self.call_within, None, None, fn, *args, **kwargs)

    def call_within(
        self,
        seconds: float | None,
        is_clean: Callable[[T], bool] | None,
        fn: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Make a call with a time limit, and block this thread until it is done.

        With ``is_clean``, a process whose call fails, or returns a value that is not clean, is not reused.
        Raises ChildDied, and ChildLost also on timeout.
        """
        with self._lock:
            if self._ended:
                raise ChildLost("the work was ended")
            child = self._idle.pop() if self._idle else Child()
            self._busy.add(child)
        is_reusable = is_clean is None
        try:
            value = child.call(seconds, fn, *args, **kwargs)
            is_reusable = is_clean is None or is_clean(value)
            return value
        except (ChildDied, ChildLost, WorkerDied):
            is_reusable = False
            raise
        finally:
            with self._lock:
                self._busy.remove(child)
                if is_reusable:
                    self._idle.append(child)
            if not is_reusable:
                child.__exit__()

    def kill(self) -> None:
        """Kill the busy processes; later calls raise ChildLost. Thread-safe."""
        with self._lock:
            self._ended = True
            for child in self._busy:
                child.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not self.was_made_here:  # a forked copy has no threads, and one may have held the lock
            return
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.__exit__()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and self.was_made_here:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self.kill()
        self.shutdown(wait=True, cancel_futures=True)
