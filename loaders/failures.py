"""Exceptions on their way from a worker to the one who waits for its rows."""

from __future__ import annotations

import traceback
from typing import cast

from ..formats.errors import OperationError
from .trusted import dumps, loads


class WorkFailed(OperationError):
    """A worker's exception that cannot travel as itself, being unpicklable; the message has its traceback."""


def pack(error: BaseException) -> bytes:
    """The exception and its traceback as text; only the text where its class does not survive pickling.

    Nor does an exit or an interruption travel as itself: it would end the process that trains, silently.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, Exception):
        return dumps((None, text))
    try:
        data = dumps((error, text))
        loads(data)
    except Exception:  # a stranger's class may raise anything, and it is `error` that has to be reported
        return dumps((None, text))
    return data


def unpack(data: bytes, where: str) -> BaseException:
    """The exception as itself, with ``where`` and the worker's traceback as a note; or else WorkFailed."""
    error, text = loads(data)
    note = f"In a worker, {where}:\n{text}"
    if error is None:
        return WorkFailed(note)
    error.add_note(note)
    return cast("BaseException", error)
