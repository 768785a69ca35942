"""Output of ``prep``: text, tables and JSON; errors as one line on stderr, and progress beside them."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from pathlib import Path, PurePath
from typing import Any

import click

from shardprep.formats.errors import MAX_CHARACTERS, ShardprepError, printable
from shardprep.formats.runtime.files import FULL_DISK, full_disk_message
from shardprep.formats.runtime.progress import BarProgress, NoProgress, Pace, bar_class, count_of
from shardprep.formats.shards.dataset import is_collection
from shardprep.formats.shards.read import MANIFEST_NAME
from shardprep.formats.storage.open import cached_place, datasets_in, read_collection

EXIT_OPERATION_FAILED = 3

MAX_LINE_CHARACTERS = 4 * MAX_CHARACTERS  # an error has a path, a shard, a key and a message


def say(text: str = "", *, err: bool = False) -> None:
    """Print a line, made printable: it may quote names from files. One that stderr does not take is lost."""
    with suppress(OSError) if err else nullcontext():
        click.echo(printable(text, MAX_LINE_CHARACTERS), err=err)


def next_step(*words: str | PurePath) -> str:
    """Return the line that suggests the next command of ``prep``, quoted for a shell."""
    return f"next: prep {shlex.join(map(str, words))}"


def fields(values: Mapping[str, object], indent: str = "  ") -> Iterator[str]:
    """Yield names and values in two columns, made printable; values of None are left out."""
    shown = {printable(name): printable(str(value)) for name, value in values.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        yield f"{indent}{name:<{width}}  {value}"


def format_columns(columns: Mapping[str, str]) -> str | None:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or None


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@dataclass(frozen=True)
class Output:
    """A command's output: JSON, lines of text, exit code, and a ``result`` to summarise several datasets."""

    json: dict[str, Any]
    lines: Iterable[str]
    exit_code: int = 0
    result: Any = None

    def print_lines(self) -> None:
        for line in self.lines:
            say(line)


def json_option(command: Callable[..., Output]) -> Callable[..., int]:
    """Add ``--json`` to a command, print the Output it returns, and return its exit code."""

    @click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
    )
    @wraps(command)
    def print_output(*arguments: Any, as_json: bool, **options: Any) -> int:
        output = command(*arguments, **options)
        if as_json:
            print_json(output.json)
        else:
            output.print_lines()
        return output.exit_code

    return print_output


def for_each_dataset(
    folder: Path | str,
    work: Callable[[Any], Output],
    summary: Callable[[Mapping[str, Any]], str],
    *,
    by_part: bool = False,
) -> Output:
    """Run the command's ``work`` on a dataset, on each split in a folder, or ``by_part`` of a collection.

    Each of several datasets is printed as soon as it is done, and fails alone. ``work`` takes a folder or a
    URL; ``summary`` returns one line about the results by name.
    """
    chosen = click.get_current_context().params
    if "cache" in chosen:  # said once, not for each split
        cached_place(folder, chosen["cache"], chosen["cache_limit"])
    kind, about, parts = "splits", {}, {}
    if by_part and isinstance(folder, Path) and is_collection(folder):
        collection = read_collection(folder)
        kind, about = "parts", {"root": collection.root}
        parts = {part.name: part for part in collection.parts}
        places: Mapping[str, Path | str] = {name: part.folder(folder) for name, part in parts.items()}
    elif not (places := datasets_in(folder)):
        return work(folder)
    results: dict[str, Any] = {}
    items, codes, failed = [], set(), []
    for name, place in places.items():
        try:
            if name in parts:
                parts[name].manifest(Path(folder))  # raises if it is not the collection's part
            output = work(place)
        except (ShardprepError, OSError) as error:
            failure = describe_failure(error)
            failure.report(as_json=False)
            codes.add(failure.exit_code)
            failed.append(name)
            items.append({"dataset": str(place), "path": str(place), "ok": False, "error": failure.to_json()})
            continue
        results[name] = output.result
        codes.add(output.exit_code)
        items.append({"ok": output.exit_code == 0} | output.json)
        if not chosen["as_json"]:
            output.print_lines()
    code = 1 if 1 in codes else max(codes)  # damage takes precedence over other failures
    line = f"{folder}: {summary(results) if results else 'nothing was done'}"
    if failed:
        line += f"; {', '.join(failed)} failed"
    as_object = {"folder": str(folder), "ok": code == 0, "exit_code": code, kind: items, **about}
    return Output(as_object, [line, *fields(about)], code)


class Interrupted(BaseException):
    """Raised by the first signal to unwind the program; its message includes its notes."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number  # as in a shell

    def __str__(self) -> str:
        return "; ".join((super().__str__(), *getattr(self, "__notes__", ())))


ADVICE = {
    errno.EEXIST: "something else has that name; remove it, and run the same command again",
    errno.EFBIG: "the file would be larger than the system allows; raise ulimit -f",
    errno.EIO: "Input/output error: see dmesg, and run it again",
    errno.EMFILE: "too many open files; raise ulimit -n",
    errno.ESTALE: "Stale file handle: the file server replaced the file; run it again",
    **dict.fromkeys(
        (errno.ENOSYS, errno.ENOTSUP), "the file system there cannot do this; choose a folder on another disk"
    ),
}

CommandError = ShardprepError | click.ClickException | OSError | ImportError | MemoryError | Interrupted


@dataclass(frozen=True)
class Failure:
    """An error that ends a command, or its work on one dataset; ``line`` has the message and its place."""

    kind: str
    message: str
    line: str
    exit_code: int
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "exit_code": self.exit_code, **self.data}

    def report(self, *, as_json: bool) -> None:
        """Print the line to stderr and, ``as_json``, an object to stdout; streams that fail are skipped."""
        say(f"prep: {' '.join(map(str.strip, self.line.splitlines()))}", err=True)
        if as_json:
            with suppress(OSError):
                print_json({"error": self.to_json()})


def describe_failure(error: CommandError) -> Failure:
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
            full = full_disk_message(error.filename, error.errno) if error.errno in FULL_DISK else None
            message = full or ADVICE.get(error.errno or 0) or error.strerror or str(error)
            file = error.filename2 or error.filename  # of a link, the link and not its target
            if file is None and error.errno == errno.ENOENT:  # of tempfile, or of os.getcwd
                message = "the current folder was removed; change to another one, and run it again"
                if error.strerror != os.strerror(errno.ENOENT):
                    message = f"{error.strerror}; set TMPDIR to a folder that can be written to"
            elif error.errno == errno.ENOENT and Path(str(file)).with_name(MANIFEST_NAME).exists():
                message = "is missing; prep repair rebuilds it"
            place = None if file is None else str(file)
            line = ": ".join(printable(part) for part in (place, message) if part)
            data = {"path": place, "errno": error.errno}
            return Failure(type(error).__name__, message, line, EXIT_OPERATION_FAILED, data)
        case ImportError():
            message = f"cannot be loaded: {error}"
            return Failure("ImportError", message, printable(message), EXIT_OPERATION_FAILED)
        case MemoryError():
            message = "there is not enough memory; use fewer --workers"
            return Failure("MemoryError", message, message, EXIT_OPERATION_FAILED)
    return Failure("Interrupted", str(error), str(error), error.exit_code, {"signal": error.number})


def is_json_requested(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is among the arguments; errors while they are parsed are JSON, too."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


PROGRESS_FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
FIRST_STATUS_S = 5.0
SHARD_INTERVAL_S = 1.0


class CommandProgress(NoProgress):
    """The progress of a command; this one shows nothing."""

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows a text in the place of the one before."""
        yield lambda text: None


def make_progress(form: str) -> CommandProgress:
    """Return the progress in one of PROGRESS_FORMS: "auto" is a bar on a terminal, else lines."""
    if form == "auto":
        form = "bar" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[CommandProgress]] = {"bar": CommandBar, "plain": PlainProgress}
    return kinds.get(form, CommandProgress)()


def print_with_time(text: str) -> None:
    """Print a line of progress to stderr."""
    say(f"{time.strftime('%H:%M:%S')} {text}", err=True)


class CommandBar(BarProgress, CommandProgress):
    """A bar on a terminal."""

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        with bar_class()(bar_format="{desc}", leave=False, dynamic_ncols=True) as bar:
            yield bar.set_description_str


class PlainProgress(CommandProgress):
    """Lines for a log: notes, finished shards at most once a second, and the state every 30 seconds."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._title, self._pace = "", Pace(0, 0)
        self._next = self._printed = 0.0
        self._shards = ""
        self._shown = 0  # records or bytes in the last line

    def note(self, text: str) -> None:
        print_with_time(text)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._title, self._pace = title, Pace(records, size)
        self._shards, self._shown = "", 0
        self._next = time.monotonic() + self._interval_s
        yield

    def at(self, records: int, size: int) -> None:
        self._pace.at(records, size)
        if time.monotonic() >= self._next:
            self._print()

    def shards(self, done: int, total: int) -> None:
        """Print a line after progress, at most once a second, and when all shards are done."""
        self._shards = f"{done:,} of {count_of(total, 'shard')}"
        is_due = self._shown != self._pace.done and time.monotonic() >= self._printed + SHARD_INTERVAL_S
        if is_due or done == total:
            self._print()

    def _print(self) -> None:
        pace = self._pace
        self._printed = time.monotonic()
        self._next = self._printed + self._interval_s
        self._shown = pace.done
        left = round(pace.seconds_left())
        remaining = f"{timedelta(seconds=left)} left" if left else ""
        state = [f"{pace.share:.0%}", self._shards, *pace.rates(), remaining]
        print_with_time(f"{self._title}: {', '.join(part for part in state if part)}")

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        due = time.monotonic() + min(FIRST_STATUS_S, self._interval_s)

        def show(text: str) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + self._interval_s
                print_with_time(text)

        yield show
