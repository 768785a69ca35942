"""Executors supplied by the caller: calls on any of them, and an adapter for Ray clusters."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Generic, ParamSpec, TypeVar

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.runtime.owned import Owned

# The number of workers is unknown: Executor has no attribute for it, and a cluster may grow. A call
# takes 80 bytes per image, which is 200 KB for a shard of 256 MiB, so that 256 of them take 50 MB here.
AT_ONCE = 256

T = TypeVar("T")


class ExecutorFailed(OperationError):
    """An executor lost a call, was shut down, or could not run it; ``shard`` is the one it was for."""


@dataclass(frozen=True, eq=False)
class ExecutorCall(Generic[T]):
    """A picklable call for a shard, or another file, in the dataset at ``path``.

    The call returns its error, to tell it from one of the executor. ``kept`` says what a repeated call keeps.
    """

    call: Callable[[], T]
    path: str | os.PathLike[str]
    shard: str
    kept: str = ""

    def submitted(self, executor: Executor) -> Future[T | Exception]:
        """Submit the call. Raises ExecutorFailed."""
        try:
            return executor.submit(_value_or_error, self.call)
        except Exception as error:
            raise self._failed(error) from error

    def value_of(self, future: Future[T | Exception]) -> T:
        """Return, or raise, what the call did. Raises ExecutorFailed for errors of the executor itself."""
        try:
            value = future.result()
        except Exception as error:
            raise self._failed(error) from error
        except BaseException as error:
            if type(error).__name__ != "CancelledError":  # asyncio's, which engines raise, is no Exception
                raise
            raise self._failed(error) from error
        if isinstance(value, Exception):
            raise value
        return value

    def _failed(self, error: BaseException) -> ExecutorFailed:
        said = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
        return ExecutorFailed(
            f"the executor did not run this shard's job ({said}); check that its workers are alive, "
            f"reachable and have this version of shardprep. {self.kept or 'Then run it again'}",
            path=self.path,
            shard=self.shard,
        )


def _value_or_error(call: Callable[[], T]) -> T | Exception:
    """Make the call. An unexpected error gets the worker's traceback as a note."""
    try:
        return call()
    except (ShardprepError, OSError, MemoryError) as error:
        return error
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text; engines append logs of many."""
    return next((line for line in str(error).splitlines() if line.strip()), "")


class OtherMachine(OperationError):
    """A machine that sees another source or output, or has other versions of libraries; ``host`` names it."""

    host = ""


def other_machine(text: str, path: str | os.PathLike[str] | None = None) -> OtherMachine:
    """Return the error that says ``text`` of this machine."""
    host = socket.gethostname()
    error = OtherMachine(f"the machine {host} {text}", path=path)
    error.host = host
    return error


def refuse_other_versions(home: Mapping[str, str], here: Mapping[str, str], work: str) -> None:
    """Raise OtherMachine if these versions ``here`` are not those of the machine that began the ``work``."""
    differing = [name for name in {**home, **here} if home.get(name) != here.get(name)]
    if differing:
        theirs, ours = (", ".join(f"{n} {v.get(n, 'none')}" for n in differing) for v in (home, here))
        raise other_machine(
            f"has {ours}, but the {work} was begun with {theirs}; install those versions there"
        )


P = ParamSpec("P")

RETRIES = 3  # of a task whose worker was killed; Ray's own default

# A process that joined a cluster is ended by Ray, with exit code 1, when the head is silent for a minute.
HEAD_INTERVAL_S = 2.0
HEAD_SILENT_S = 20.0


class RayExecutor(Owned, Executor):
    """Runs each call as a task of the Ray cluster that this process is connected to by ``ray.init``.

    ``options`` are those of ``ray.remote``, such as ``num_cpus`` and ``resources``. A task runs again if its
    worker is killed, at most RETRIES times. A call that is cancelled is not taken back from the cluster. Once
    the cluster is gone, calls raise ConnectionError. Ending the executor leaves the connection open. Raises
    ImportError without Ray, and ConnectionError without a connection.
    """

    def __init__(self, **options: Any) -> None:
        import ray  # only with the extra ray

        self._ray: Any = ray
        self._refuse_unconnected()
        self._task: Any = ray.remote(**{"max_retries": RETRIES, **options})(_call)
        self._pending: set[Future[Any]] = set()
        self._end = threading.Event()
        self._silent = ""  # the address of a head that is silent
        if not self._ray.util.client.ray.is_connected():  # that of ray:// watches itself
            head = self._ray.get_runtime_context().gcs_address
            threading.Thread(target=self._watch, args=(head,), name="shardprep-ray", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call as a task of the cluster. Raises ConnectionError, and RuntimeError after the end."""
        if self._end.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._refuse_unconnected()
        reference = self._task.remote(fn, args, kwargs)
        future: Future[T] = Future()  # not Ray's own, which ends a thread of Ray if it was cancelled
        self._pending.add(future)
        self._fail_if_silent()  # the watch ends with those that were there
        future.add_done_callback(self._pending.discard)
        reference.future().add_done_callback(partial(_settle, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the executor; ``wait`` for what runs. The connection stays open. Idempotent."""
        self._end.set()
        pending = list(self._pending)
        for future in pending if cancel_futures else ():
            future.cancel()
        if wait:
            _await(pending)

    def _refuse_unconnected(self) -> None:
        if not self._ray.is_initialized():  # Ray would start a cluster of its own
            raise ConnectionError("Ray is not connected to a cluster")

    def _watch(self, head: str) -> None:
        """Fail all calls once the head at that address is silent."""
        heard = monotonic()
        while not self._end.wait(HEAD_INTERVAL_S):
            if _answers(head):
                heard = monotonic()
            elif monotonic() - heard > HEAD_SILENT_S:
                self._silent = head
                self._end.set()
                self._fail_if_silent()

    def _fail_if_silent(self) -> None:
        for future in list(self._pending) if self._silent else ():
            with suppress(InvalidStateError):  # it is done since
                future.set_exception(ConnectionError(f"the head of Ray at {self._silent} does not answer"))


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _settle(future: Future[T], done: Future[T]) -> None:
    """End a future as another one did, unless it has ended."""
    with suppress(InvalidStateError):
        try:
            future.set_result(done.result())
        except InvalidStateError:
            raise
        except BaseException as error:
            future.set_exception(error)


def _await(futures: list[Future[Any]]) -> None:
    wait([future for future in futures if not future.cancelled()])  # which wait() misses


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_INTERVAL_S).close()
    except OSError:
        return False
    return True
