"""Shards that stay in the cache while batches are filled from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from shardprep.formats.dataset.remote.caching.held import Held
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned


class HeldShards:
    """``shards`` that several batches have; released when the last of them has given them back."""

    def __init__(self, shards: frozenset[int], held: Held) -> None:
        self.shards = shards
        self._held = held
        self._batches = 0
        self._released = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the shards for a batch; False if they were released before."""
        with self._lock:
            self._batches += not self._released
            return not self._released

    def give_back(self) -> None:
        """Give back what one batch had."""
        with self._lock:
            self._batches -= 1
            self._released = not self._batches
        if self._released:
            self._held.release()


class HoldThreads(Owned):
    """Threads that each wait until some files are held. Daemons: the cache's end ends them."""

    def __init__(self) -> None:
        self._running: list[threading.Thread] = []

    def begin(self, hold: Callable[[], Held]) -> Future[Held]:
        """Call ``hold``, which may wait for a download, in a thread."""
        found: Future[Held] = Future()

        def run() -> None:
            try:
                held = hold()
            except BaseException as error:  # raised in the thread that asks for the result
                found.set_exception(error)
            else:
                found.set_result(held)

        self._running = [thread for thread in self._running if thread.is_alive()]
        thread = threading.Thread(target=run, name="shardprep-hold", daemon=True)
        with starting_thread():
            thread.start()
        self._running.append(thread)
        return found

    def join(self, timeout_s: float) -> None:
        """Wait for their end, for at most so many seconds each."""
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join(timeout_s)


def abandon(pending: Future[Held]) -> None:
    """Release what is held, or will be, without being used."""
    pending.add_done_callback(_release)


def _release(pending: Future[Held]) -> None:
    if pending.exception() is None:
        pending.result().release()
