"""The running of looks at shards in worker processes, and of those that crash in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeVar

from shardprep.formats.processes.child_process import ChildDied
from shardprep.formats.processes.worker_pool import WorkerPool
from shardprep.formats.progress import Progress

from .shard_looks import Merged, ShardLook

MOST_AT_ONCE = 512  # images in one call, so that the progress moves

T = TypeVar("T", bound=Merged)


def run_looks(
    looks: Iterable[ShardLook[T]], into: T, pool: WorkerPool, workers: int, progress: Progress
) -> T:
    """Merge what all looks find into a result, in their order, and return it.

    Few are submitted at a time, since each holds its rows of the index. A look that crashes its process is
    divided until the image is found, which is damaged then. Raises what a look raises, and ChildLost.
    """
    waiting: deque[tuple[ShardLook[T], Future[T]]] = deque()
    done_records = done_bytes = 0

    def take() -> None:
        nonlocal done_records, done_bytes
        look, future = waiting.popleft()
        into.merge(_value(look, future, pool))
        done_records += len(look.numbers)
        done_bytes += int(look.rows["length"].sum())
        progress.at(done_records, done_bytes)

    for whole in looks:
        for start in range(0, len(whole.numbers), MOST_AT_ONCE):
            look = whole.part(slice(start, start + MOST_AT_ONCE))
            waiting.append((look, pool.submit(look.made)))
            if len(waiting) > workers:
                take()
    while waiting:
        take()
    return into


def _value(look: ShardLook[T], future: Future[T], pool: WorkerPool) -> T:
    try:
        return future.result()
    except ChildDied as error:
        if len(look.numbers) == 1:
            return look.crashed(error.signal)
    half = len(look.numbers) // 2
    parts = [look.part(slice(0, half)), look.part(slice(half, None))]
    found = look.empty()
    for part in parts:
        found.merge(_value(part, pool.submit(part.made), pool))
    return found
