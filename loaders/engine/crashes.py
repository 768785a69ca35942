"""What happens to a row at which several workers end."""

from __future__ import annotations

from dataclasses import dataclass

from shardprep.formats.errors import WorkerDied
from shardprep.formats.processes.child_process import CRASHES
from shardprep.loaders.engine.protocol.leases import MAX_ROW_FAILURES

_CRASHES = frozenset(number.name for number in CRASHES)


@dataclass(frozen=True)
class CrashPolicy:
    """Policy for a row at which MAX_ROW_FAILURES workers ended.

    The row is an error; with ``skip`` it is left out if each of them crashed. A crash is an end by a signal
    that a fault in code raises, such as SIGSEGV. ``doing`` says what crashed.
    """

    doing: str = "the work on it"
    skip: bool = False

    def reason_to_skip(self, cause: str) -> str | None:
        """The reason to leave out a row at which a worker ended by this cause; None if that is an error."""
        return self._crashed(cause) if self.skip and cause in _CRASHES else None

    def error(self, cause: str, *, where: str, key: str) -> WorkerDied:
        """Return the error of a row at which workers ended, the last by this cause."""
        if cause in _CRASHES:
            message = (
                f"{where}: {self._crashed(cause)}, in {MAX_ROW_FAILURES} workers one after the other; "
                'leave it out (on_bad_record="skip" of a Loader)'
            )
        else:
            message = (
                f"{MAX_ROW_FAILURES} workers ended {where}, the last by {cause}; "
                "do that work in a separate program to see what happens there, because it would end this one, too; "
                "or leave it out"
            )
        return WorkerDied(message, key=key)

    def _crashed(self, cause: str) -> str:
        return f"{self.doing} crashed by {cause}"
