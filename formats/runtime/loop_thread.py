"""A thread that runs coroutines, which leaves the calling thread free to handle signals."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from shardprep.formats.runtime.owners import Owner

POLL_INTERVAL_S = 0.1

T = TypeVar("T")


class LoopThread(Owner, AbstractContextManager["LoopThread"]):
    """A context with an asyncio event loop in its own thread, and up to ``threads`` for blocking calls.

    An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine it waits for. Leaving
    the context waits for all coroutines and blocking calls. If it is dropped, the thread ends after these.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(pool := ThreadPoolExecutor(self._threads, "shardprep-blocking"))
        arguments = self._loop, pool
        self._thread = threading.Thread(target=_run, args=arguments, name="shardprep-loop", daemon=True)
        self._finalizer = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        self._finalizer.atexit = False
        self._thread.start()
        return self

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine and return its result, as :meth:`result` does."""
        return self.result(self.begin(work), tick)

    def result(self, future: Future[T], tick: Callable[[], None] = lambda: None) -> T:
        """Wait for a coroutine's result; call ``tick`` in this thread every 0.1 s, and at the end."""
        try:
            while not wait([future], POLL_INTERVAL_S).done:
                tick()
        except BaseException:
            future.cancel()
            raise
        tick()
        return future.result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Any thread may wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self) -> None:
        """Cancel all coroutines. Threads that wait for one get ``concurrent.futures.CancelledError``."""
        self.begin(_cancel_others()).result()

    def __exit__(self, *exc: object) -> None:
        if self._finalizer.detach():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run(loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor) -> None:
    """Run a loop until it is stopped, and then until all its coroutines and blocking calls have ended."""
    loop.run_forever()
    loop.run_until_complete(_finish_others())
    pool.shutdown()  # the loop's own shutdown_default_executor would start a thread, and there may be none
    loop.close()


async def _cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _finish_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


async def run_all(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]], at_once: int) -> None:
    """Run all calls, at most ``at_once`` concurrently. Raise the first failure, and cancel the others."""
    remaining = iter(calls)
    failures: Sequence[BaseException] = ()

    async def run_remaining() -> None:
        for call in remaining:
            await call()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(calls))):
                group.create_task(run_remaining())
    except BaseExceptionGroup as error:
        failures = error.exceptions
    for failure in failures:  # outside of the handler, which would replace the failure's own context
        raise failure


async def call_in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Call a blocking function in a thread. A cancellation waits for it, since it may use a descriptor.

    Once the loop or the program is shutting down, which allows no new threads, the function is called here.
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        return call(*arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):  # a further one
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # otherwise asyncio logs that it was never retrieved
        raise
