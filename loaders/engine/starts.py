"""Count of the failed starts of workers, and the decision whether to start another."""

from __future__ import annotations

from collections import Counter

from shardprep.formats.errors import WorkerDied
from shardprep.formats.processes.child_process import START_TIMEOUT_S, not_ready

from .worker_process import cause_of

MIN_START_TIMEOUT_S = 30.0  # a deadline is for one row; a start imports the libraries that all rows need
MAX_FAILED_STARTS = 10  # workers killed before they are ready, while no other sends a message
MAX_OVERDUE_STARTS = 2  # of one worker in a row


_ADVICE = (
    "see what the workers wrote to stderr. If the work is defined in the main script, put everything else in "
    'that script under `if __name__ == "__main__":`'
)


class Starts:
    """Counter of failed starts. ``timeout`` is how many seconds a worker has to open its work.

    The default is START_TIMEOUT_S; with a ``deadline`` of rows it is that, but at least MIN_START_TIMEOUT_S.
    """

    def __init__(self, *, timeout: float | None, deadline: float | None) -> None:
        usual = START_TIMEOUT_S if deadline is None else max(deadline, MIN_START_TIMEOUT_S)
        self.timeout = usual if timeout is None else timeout
        self._failed = 0
        self._overdue: Counter[int] = Counter()

    def answered(self) -> None:
        """Reset the count of failures: a worker has sent a message."""
        self._failed = 0

    def succeeded(self, worker: int) -> None:
        """Note that the worker is ready."""
        del self._overdue[worker]

    def failed(self, worker: int, code: int | None, *, overdue: bool) -> None:
        """Note that the worker ended before it was ready, or was killed because it was ``overdue``.

        Raises WorkerDied where the next start would fail in the same way: after an exit, or after repeated
        kills.
        """
        if overdue:
            self._overdue[worker] += 1
            if self._overdue[worker] >= MAX_OVERDUE_STARTS:
                raise _start_timed_out(self.timeout)
            return
        self._failed += 1
        if self._failed >= MAX_FAILED_STARTS or (code is not None and code >= 0):
            raise WorkerDied(f"a worker ended before it was ready, by {cause_of(code)}; {_ADVICE}")


def _start_timed_out(seconds: float) -> WorkerDied:
    error = not_ready(seconds)
    error.message += ". If opening the work needs more time, give a `deadline` of so many seconds"
    return error
