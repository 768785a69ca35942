"""The running of the checks of files: in threads of this process, or on an executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NoReturn, TypeVar

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.processes.executors.executor_call import AT_ONCE, ExecutorCall, ExecutorFailed
from shardprep.formats.processes.executors.other_machine import OtherMachine
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.formats.progress import Progress
from shardprep.formats.system.owned import Owned

from .seen_dataset import SeenDataset

POLL_INTERVAL_S = 0.2

T = TypeVar("T")

Outcome = Callable[[], T]
"""What returns, or raises, what a check did."""


@dataclass(frozen=True)
class CheckRunner(Owned):
    """Runs calls that read one file each: in threads, or ``elsewhere`` if that is given.

    ``elsewhere`` is an executor, and the dataset as this machine sees it. ``workers`` is the number of calls
    at a time; None and 0 are one per usable CPU, or AT_ONCE elsewhere. ``end`` ends the calls of threads.
    """

    elsewhere: tuple[Executor, SeenDataset] | None
    workers: int | None
    progress: Progress
    end: Callable[[], None]

    def run(
        self, title: str, files: Sequence[FileEntry], calls: Sequence[Callable[[], T]]
    ) -> Iterator[tuple[FileEntry, Outcome[T]]]:
        """Make each file's call; once all are made, yield the files in order, each with its outcome.

        The progress counts the records and sizes of ``files``. The calls are picklable if there is an
        executor. Raises ExecutorFailed and OtherMachine, which end the rest.
        """
        outcomes: dict[int, Outcome[T]] = {}
        done_records = done_bytes = 0
        records, size = sum(e.records for e in files), sum(e.size for e in files)
        with self.progress.task(title, records=records, size=size), closing(self._made(files, calls)) as made:
            for place, outcome in made:
                done_records, done_bytes = done_records + files[place].records, done_bytes + files[place].size
                self.progress.at(done_records, done_bytes)
                outcomes[place] = outcome
        yield from ((file, outcomes[place]) for place, file in enumerate(files))

    def _made(
        self, files: Sequence[FileEntry], calls: Sequence[Callable[[], T]]
    ) -> Generator[tuple[int, Outcome[T]]]:
        """Make the calls; yield the place of each and its outcome as soon as that is known."""
        if self.elsewhere is None:
            return self._in_threads(calls)
        executor, seen = self.elsewhere
        named = zip((file.name for file in files), calls, strict=True)
        sent = (ExecutorCall(partial(seen.called, name, call), seen.path, name) for name, call in named)
        return self._on(executor, enumerate(sent))

    def _in_threads(self, calls: Sequence[Callable[[], T]]) -> Generator[tuple[int, Outcome[T]]]:
        with ThreadPoolExecutor(usable_cpus() if self.workers is None else max(1, self.workers)) as pool:
            try:
                with starting_thread():
                    futures = {pool.submit(call): place for place, call in enumerate(calls)}
                for future in as_completed(futures):
                    yield futures[future], future.result
            except BaseException:
                self.end()
                pool.shutdown(cancel_futures=True)
                raise

    def _on(
        self, executor: Executor, calls: Iterator[tuple[int, ExecutorCall[T]]]
    ) -> Generator[tuple[int, Outcome[T]]]:
        pending: dict[Future[T | Exception], tuple[int, ExecutorCall[T]]] = {}
        try:
            while True:
                for place, call in islice(calls, (self.workers or AT_ONCE) - len(pending)):
                    pending[call.submitted(executor)] = place, call
                if not pending:
                    return
                wait(pending, timeout=POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
                for future in [each for each in pending if each.done()]:  # wait() misses cancelled ones
                    place, call = pending.pop(future)
                    yield place, _outcome(call, future)
        finally:
            for future in pending:
                future.cancel()


def _outcome(call: ExecutorCall[T], future: Future[T | Exception]) -> Outcome[T]:
    """Return the outcome of a check. Raises ExecutorFailed and OtherMachine, which are no finding."""
    try:
        value = call.value_of(future)
    except (ExecutorFailed, OtherMachine):
        raise
    except Exception as error:
        return partial(_raise, error)
    return lambda: value


def _raise(error: Exception) -> NoReturn:
    raise error
