"""Calls on executors supplied by the user, and an executor for Ray clusters."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, InvalidStateError, wait as await_all
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.runtime.owned import Owned

# The number of workers is unknown: Executor has no attribute for it, and a cluster may grow. A call takes 80
# bytes per image, or 200 KB for a shard of 256 MiB; 256 calls take 50 MB in this process.
AT_ONCE = 256

T = TypeVar("T")


class ExecutorFailed(OperationError):
    """An executor could not run a call, lost it, or was shut down. ``shard`` is the call's shard."""


@dataclass(frozen=True, eq=False)
class ExecutorCall(Generic[T]):
    """A picklable call for a shard or another file of the dataset at ``path``.

    The call returns its errors, which tells them from the executor's own. ``kept`` ends the message about
    these, and says what a second run keeps.
    """

    call: Callable[[], T]
    path: str | os.PathLike[str]
    shard: str
    kept: str = "Then run it again"

    def submitted(self, executor: Executor) -> Future[T | Exception]:
        """Submit the call. Raises ExecutorFailed if the executor refuses it."""
        try:
            return executor.submit(_value_or_error, self.call)
        except Exception as error:
            raise self._failed(error) from error

    def value_of(self, future: Future[T | Exception]) -> T:
        """Return the call's result, or raise its error; ExecutorFailed for an error of the executor."""
        try:
            value = future.result()
        except BaseException as error:
            # asyncio's CancelledError, which some executors raise, is not an Exception.
            if isinstance(error, Exception) or type(error).__name__ == "CancelledError":
                raise self._failed(error) from error
            raise
        if isinstance(value, Exception):
            raise value
        return value

    def _failed(self, error: BaseException) -> ExecutorFailed:
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")  # logs may follow
        said = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        return ExecutorFailed(
            f"the executor did not run this shard's job ({said}); check that its workers are alive, "
            f"reachable and have this version of shardprep. {self.kept}",
            path=self.path,
            shard=self.shard,
        )


def _value_or_error(call: Callable[[], T]) -> T | Exception:
    """Return the call's result or error. An unexpected error gets the worker's traceback as a note."""
    try:
        return call()
    except (ShardprepError, OSError, MemoryError) as error:
        return error
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


class OtherMachine(OperationError):
    """The machine ``host`` sees a different source or output, or has different library versions."""

    host = ""


def other_machine(text: str, path: str | os.PathLike[str] | None = None) -> OtherMachine:
    host = socket.gethostname()
    error = OtherMachine(f"the machine {host} {text}", path=path)
    error.host = host
    return error


def refuse_other_versions(home: Mapping[str, str], here: Mapping[str, str], work: str) -> None:
    """Raise OtherMachine if the versions ``here`` differ from those at ``home``, where the work began."""
    differing = [name for name in {**home, **here} if home.get(name) != here.get(name)]
    if differing:
        theirs, ours = (", ".join(f"{n} {v.get(n, 'none')}" for n in differing) for v in (home, here))
        raise other_machine(
            f"has {ours}, but the {work} was begun with {theirs}; install those versions there"
        )


P = ParamSpec("P")

RETRIES = 3  # of a task whose worker was killed; also Ray's default


class RayExecutor(Owned, Executor):
    """Runs each call as a task of the Ray cluster to which ``ray.init`` connected this process.

    ``options`` are passed to ``ray.remote``, for example ``num_cpus`` and ``resources``. A task whose worker
    is killed is retried up to RETRIES times. Cancelling a call does not stop its task. Shutting down the
    executor leaves the connection open. Raises ImportError without Ray, and ConnectionError without a
    connection.
    """

    def __init__(self, **options: Any) -> None:
        import ray  # only with the extra ray

        self._ray: Any = ray
        self._refuse_unconnected()
        self._task: Any = ray.remote(**{"max_retries": RETRIES, **options})(_call)
        self._pending: set[Future[Any]] = set()
        self._has_ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call as a task. Raises ConnectionError, and RuntimeError after a shutdown."""
        if self._has_ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._refuse_unconnected()
        reference = self._task.remote(fn, args, kwargs)
        future: Future[T] = Future()  # cancelling Ray's own future would end a thread of Ray
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        reference.future().add_done_callback(partial(_settle, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down, and optionally ``wait`` for pending calls. Idempotent."""
        self._has_ended = True
        pending = list(self._pending)
        for future in pending if cancel_futures else ():
            future.cancel()
        if wait:
            await_all([future for future in pending if not future.cancelled()])  # it would hang

    def _refuse_unconnected(self) -> None:
        if not self._ray.is_initialized():  # a call would make Ray start a cluster of its own
            raise ConnectionError("Ray is not connected to a cluster")


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _settle(future: Future[T], done: Future[T]) -> None:
    """Copy the outcome of ``done`` to ``future``, unless that has one."""
    with suppress(InvalidStateError):
        try:
            future.set_result(done.result())
        except InvalidStateError:
            raise
        except BaseException as error:
            future.set_exception(error)
