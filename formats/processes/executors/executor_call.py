"""One call on an executor that the caller gave, of this machine or of many."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardprep.formats.errors import OperationError, ShardprepError

# The workers that an executor has are not known: Executor has no such attribute, and a cluster grows. A call
# takes 80 bytes per image, which is 200 KB for a shard of 256 MiB, so that 256 of them take 50 MB here.
AT_ONCE = 256

T = TypeVar("T")


class ExecutorFailed(OperationError):
    """An executor lost a call, was shut down, or could not run it; ``shard`` is the one it was for."""


@dataclass(frozen=True, eq=False)
class ExecutorCall(Generic[T]):
    """A picklable call for a shard, or another file, in the dataset at ``path``.

    The call returns its error, to tell it from one of the executor. ``kept`` says what a repeated call keeps.
    """

    call: Callable[[], T]
    path: str | os.PathLike[str]
    shard: str
    kept: str = ""

    def submitted(self, executor: Executor) -> Future[T | Exception]:
        """Submit the call. Raises ExecutorFailed."""
        try:
            return executor.submit(_value_or_error, self.call)
        except Exception as error:
            raise self._failed(error) from error

    def value_of(self, future: Future[T | Exception]) -> T:
        """Return, or raise, what the call did. Raises ExecutorFailed for what else the executor raises."""
        try:
            value = future.result()
        except Exception as error:
            raise self._failed(error) from error
        except BaseException as error:
            if type(error).__name__ != "CancelledError":  # asyncio's, which engines raise, is no Exception
                raise
            raise self._failed(error) from error
        if isinstance(value, Exception):
            raise value
        return value

    def _failed(self, error: BaseException) -> ExecutorFailed:
        said = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
        return ExecutorFailed(
            f"the executor did not run this shard's job ({said}); see whether its workers live, can be reached "
            f"and have this version of shardprep. {self.kept or 'Then repeat the call'}",
            path=self.path,
            shard=self.shard,
        )


def _value_or_error(call: Callable[[], T]) -> T | Exception:
    """Make the call. An unexpected error gets the worker's traceback as a note."""
    try:
        return call()
    except (ShardprepError, OSError, MemoryError) as error:
        return error
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text; engines append logs of many."""
    return next((line for line in str(error).splitlines() if line.strip()), "")
