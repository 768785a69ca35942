"""Exceptions of workers, packed for the process that waits for their rows."""

from __future__ import annotations

import re
import traceback
from typing import TypeVar, cast

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.loaders.buffers.pickling import dumps, loads

Reported = TypeVar("Reported", bound=ShardprepError)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # a line of a traceback that is neither code nor a note


class WorkFailed(OperationError):
    """A worker raised an exception that cannot be pickled; a note has its traceback."""


def pack(error: BaseException) -> bytes:
    """Pack the exception and its traceback as text; only the text where the exception cannot be pickled.

    The same for an exit or an interruption: raised again, it would silently end the process that trains.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, Exception):
        return dumps((None, text))
    try:
        data = dumps((error, text))
        loads(data)
    except Exception:  # any class may raise anything here; `error` is what has to be reported
        return dumps((None, text))
    return data


def unpack(data: bytes, where: str) -> BaseException:
    """Return the exception with ``where`` and the worker's traceback as a note, or else a WorkFailed."""
    error, text = loads(data)
    if error is None:
        return reported(WorkFailed, f"in a worker, {where}", text)
    error.add_note(f"In a worker, {where}:\n{text}")
    return cast("BaseException", error)


def reported(kind: type[Reported], what: str, report: str) -> Reported:
    """Return an error of ``kind`` with the exception that a report, such as a traceback, names last.

    A note has the whole report.
    """
    lines = report.splitlines() or [""]
    error = kind(f"{what}: {next(filter(_EXCEPTION.match, reversed(lines)), lines[-1])}")
    error.add_note(report)
    return error
