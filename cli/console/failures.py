"""Errors as ``prep`` tells them: one line on stderr, with --json also one object on stdout."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from shardprep.formats.errors import ShardprepError
from shardprep.formats.printable import printable
from shardprep.formats.system import full_disk

from .interruption import Interrupted
from .output import print_json, say

EXIT_OPERATION_FAILED = 3

ADVICE = {
    errno.EDQUOT: "the disk quota is used up; make room and run the same command again",
    errno.EFBIG: "the file would get larger than the system allows; raise ulimit -f",
    errno.EMFILE: "too many open files; raise ulimit -n",
}

NO_MEMORY = "there is not enough memory for this; work with fewer --workers"
CHILD_ENDED = "a process that was started for the work ended at once; run the same command again"

Reported = ShardprepError | click.ClickException | OSError | MemoryError | Interrupted


@dataclass(frozen=True)
class Failure:
    """An error that ends a command, or its work on one dataset.

    ``kind`` is the name of the error's class, ``message`` what is wrong and what to do, and ``line`` the same
    with the place. ``data`` are the error's own values, such as ``path``.
    """

    kind: str
    message: str
    line: str
    exit_code: int
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the failure as a JSON object."""
        return {"kind": self.kind, "message": self.message, "exit_code": self.exit_code, **self.data}

    def report(self, *, as_json: bool) -> None:
        """Print the line to stderr, and with ``as_json`` the object to stdout, where these can be written."""
        with suppress(OSError):
            say(f"prep: {' '.join(map(str.strip, self.line.splitlines()))}", err=True)
        if as_json:
            with suppress(OSError):
                print_json({"error": self.to_json()})


def failure_of(error: Reported) -> Failure:
    """Return how an error is told."""
    match error:
        case ShardprepError():
            return Failure(type(error).__name__, error.message, str(error), error.exit_code, _values(error))
        case click.ClickException():
            return _of_usage(error)
        case OSError():
            return _of_system(error)
        case MemoryError():
            return Failure("MemoryError", NO_MEMORY, NO_MEMORY, EXIT_OPERATION_FAILED)
    return Failure("Interrupted", str(error), str(error), error.exit_code, {"signal": error.number})


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is among the arguments, so that an error before they are parsed is JSON, too."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def _values(error: ShardprepError) -> dict[str, Any]:
    """Return the error's attributes; what JSON has no type for is text."""
    return {
        name: value if isinstance(value, str | int | float | None) else str(value)
        for name, value in vars(error).items()
        if name != "message" and not name.startswith("_")
    }


def _of_usage(error: click.ClickException) -> Failure:
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "prep"
    message = error.format_message()
    line = f"{message} (see {command} --help)"
    return Failure("UsageError", message, line, error.exit_code, {"command": command})


def _of_system(error: OSError) -> Failure:
    message = _explained(error)
    place = None if error.filename is None or isinstance(error, BrokenPipeError) else str(error.filename)
    line = ": ".join(printable(part) for part in (place, message) if part)
    data = {"path": place, "errno": error.errno}
    return Failure(type(error).__name__, message, line, EXIT_OPERATION_FAILED, data)


def _explained(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return CHILD_ENDED
    if error.errno == errno.ENOSPC:
        return full_disk.advice(error.filename)
    return ADVICE.get(error.errno or 0) or error.strerror or str(error)
