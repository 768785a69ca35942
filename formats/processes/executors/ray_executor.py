"""The tasks of a Ray cluster as a ``concurrent.futures.Executor``, which Ray does not have."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from shardprep.formats.system.owned import Owned

P = ParamSpec("P")
T = TypeVar("T")

RETRIES = 3  # of a task of which the worker was killed; Ray's own default

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
