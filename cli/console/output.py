"""Output of ``prep``: text, tables and JSON, and an error as one line on stderr."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import click

from shardprep.cli.console.start import Interrupted, load_failure
from shardprep.formats.errors import MOST_CHARACTERS, ShardprepError, printable
from shardprep.formats.runtime.files import advice

MOST_IN_LINE = 4 * MOST_CHARACTERS  # an error has a path, a shard, a key and a message


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line of text, made printable, because it may quote names from files."""
    click.echo(printable(text, MOST_IN_LINE), err=err)


def say_next(*words: str | PurePath) -> None:
    """Print the command of ``prep`` to type next, as a shell takes it."""
    say(f"next: prep {shlex.join(map(str, words))}")


def print_fields(fields: Mapping[str, object], indent: str = "  ") -> None:
    """Print names and values in two columns, each printable and on one line; None is left out."""
    shown = {printable(name): printable(str(value)) for name, value in fields.items() if value is not None}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{indent}{name:<{width}}  {value}")


def columns_text(columns: Mapping[str, str]) -> str | None:
    """Return the names of columns with their kinds; None without columns."""
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or None


def print_json(value: Any) -> None:
    """Print one JSON object to stdout; its strings are escaped as JSON requires."""
    click.echo(json.dumps(value, indent=2))


EXIT_OPERATION_FAILED = 3

ADVICE = {
    errno.EDQUOT: "the disk quota is used up; make room and run the same command again",
    errno.EFBIG: "the file would be larger than the system allows; raise ulimit -f",
    errno.EMFILE: "too many open files; raise ulimit -n",
}

NO_MEMORY = "there is not enough memory; use fewer --workers"
CHILD_ENDED = "a worker process ended as soon as it started; run the same command again"

Reported = ShardprepError | click.ClickException | OSError | ImportError | MemoryError | Interrupted


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
            data = {
                name: value if isinstance(value, str | int | float | None) else str(value)
                for name, value in vars(error).items()
                if name != "message" and not name.startswith("_")
            }
            return Failure(type(error).__name__, error.message, str(error), error.exit_code, data)
        case click.ClickException():
            context = error.ctx if isinstance(error, click.UsageError) else None
            command = context.command_path if context else "prep"
            message = error.format_message()
            line = f"{message} (see {command} --help)"
            return Failure("UsageError", message, line, error.exit_code, {"command": command})
        case OSError():
            message = _explained(error)
            has_place = error.filename is not None and not isinstance(error, BrokenPipeError)
            place = str(error.filename) if has_place else None
            line = ": ".join(printable(part) for part in (place, message) if part)
            data = {"path": place, "errno": error.errno}
            return Failure(type(error).__name__, message, line, EXIT_OPERATION_FAILED, data)
        case ImportError():
            message = load_failure(error)
            return Failure("ImportError", message, printable(message), EXIT_OPERATION_FAILED)
        case MemoryError():
            return Failure("MemoryError", NO_MEMORY, NO_MEMORY, EXIT_OPERATION_FAILED)
    return Failure("Interrupted", str(error), str(error), error.exit_code, {"signal": error.number})


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is among the arguments, so that an error before they are parsed is JSON, too."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def _explained(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return CHILD_ENDED
    if error.errno == errno.ENOSPC:
        return advice(error.filename)
    return ADVICE.get(error.errno or 0) or error.strerror or str(error)
