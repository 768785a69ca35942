"""A thread that runs coroutines, while the calling thread stays free for signals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeVar

from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.owned import Owned, starting_thread

POLL_INTERVAL_S = 0.1

T = TypeVar("T")


class LoopThread(Owned, AbstractContextManager["LoopThread"]):
    """An event loop of asyncio in a thread of its own, within the context; ``threads`` for what blocks.

    An exception in the calling thread, such as KeyboardInterrupt, cancels what runs. Leaving the context
    waits for all that was begun.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> LoopThread:
        """Start the thread. Raises OperationError if the system allows none."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(self._threads, "shardprep-blocking"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="shardprep-loop", daemon=True)
        try:
            with starting_thread():
                self._thread.start()
        except OperationError:
            self._loop.close()
            raise
        return self

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine and return its result, as :meth:`result` does."""
        return self.result(self.begin(work), tick)

    def result(self, future: Future[T], tick: Callable[[], None] = lambda: None) -> T:
        """Return the result of the coroutine; ``tick`` is called here every 0.1 s, and at the end."""
        try:
            while not wait([future], POLL_INTERVAL_S).done:
                tick()
        except BaseException:
            future.cancel()
            raise
        tick()
        with starting_thread():  # by a coroutine, for what blocks
            return future.result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine; any thread may wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self) -> None:
        """Cancel what runs, for whichever thread, which gets CancelledError of ``concurrent.futures``."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(_all_ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _all_ended() -> None:
    """Wait for all other tasks, which are cancelled or done, and for the threads."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


class RunnableWork(Protocol):
    """What :func:`run_all` runs."""

    async def run(self) -> None:
        """Do the work."""


async def run_all(works: Sequence[RunnableWork], at_once: int) -> None:
    """Run the works, ``at_once`` at the same time. The first failure cancels the others, and is raised."""
    waiting = iter(works)
    failure: BaseException
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(works))):
                group.create_task(_each(waiting))
        return
    except BaseExceptionGroup as error:
        failure = error.exceptions[0]
    raise failure


async def _each(waiting: Iterator[RunnableWork]) -> None:
    for work in waiting:
        await work.run()


async def in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks, in a thread. Cancellations wait for it: it may use a descriptor.

    Where no thread can begin any more, as the loop ends, or the program does, it is called here.
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
            with suppress(asyncio.CancelledError):  # another one
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # or asyncio complains that nobody has asked for it
        raise
