"""Coroutines in a thread end with what they called in other threads."""

import asyncio
import threading

import pytest

from shardprep.formats.runtime.loop_thread import LoopThread, in_thread


def test_a_call_in_a_thread_has_ended_when_its_coroutine_is_cancelled_twice() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        go_on.wait(60)
        over.set()

    async def cancelled_twice() -> bool:
        task = asyncio.create_task(in_thread(write))
        while not begun.is_set():
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.wait([task], timeout=0.05)
        waits = not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return waits and over.is_set()

    with LoopThread(threads=1) as loop:
        assert loop.run(cancelled_twice())
