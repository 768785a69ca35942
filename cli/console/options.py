"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from shardprep.cli.console.output import json_option
from shardprep.cli.console.progress import FORMS, progress_in
from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.files import check_replaceable, user_path
from shardprep.formats.runtime.sizes import parse_bytes
from shardprep.formats.shards.tables import INDEX_NAME
from shardprep.formats.storage.store import Location

if TYPE_CHECKING:
    from shardprep.loaders.order.epoch import Shuffle
    from shardprep.loaders.transforms.contract import Transform

T = TypeVar("T")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that adds one or more options to a command."""


class Parsed(click.ParamType[T]):
    """A parameter type with a parsing function, whose ValueError, but no other error, is a usage error.

    ``name`` is the value's name in the help; ``completion`` is "file" or "dir" if a shell can complete it.
    """

    def __init__(self, name: str, parse: Callable[[str], T], completion: str | None = None) -> None:
        self.name, self._parse, self._completion = name, parse, completion

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            made: T = self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return made

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._completion)] if self._completion else []


def _part(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)):
        raise ValueError(f"expected I/N, such as 3/64, not {text!r}")
    number, of = map(int, found.groups())
    if not 1 <= number <= of:
        raise ValueError(f"parts are numbered from 1 to {of}; there is no part {number}")
    return number, of


def _path_or_url(text: str) -> Path | str:
    return Location.parse(text).url if "://" in text else user_path(text)


def _shuffle(text: str) -> Shuffle | None:
    from shardprep.loaders.order.epoch import GlobalShuffle, LocalShuffle  # start-up time: OpenCV

    if text in ("none", "global"):
        return GlobalShuffle() if text == "global" else None
    return LocalShuffle(int(text) if text.isdecimal() else text)


SIZE = Parsed("size", parse_bytes)
PART = Parsed("part", _part)
FOLDER = Parsed("folder", user_path, "dir")
FOLDER_OR_URL = Parsed("folder or URL", _path_or_url, "dir")
ANY_PATH = Parsed("path", user_path, "file")
PATH_OR_URL = Parsed("path or URL", _path_or_url, "file")


class NamedInErrors(click.Command):
    """A command that is named in all its usage errors; click leaves it out if an option lacks its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


def command(summary: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator of a command whose help ends with these examples, each without ``prep``."""
    lines = ("\b", "Examples:", *(f"  prep {line}" for line in examples))
    return click.command(cls=NamedInErrors, short_help=summary, epilog="\n".join(lines))


def flag(option: str, words: str, *, name: str | None = None) -> Option:
    """Return a flag with the help ``words``; ``name`` is its parameter, if not the option's name."""
    return click.option(option, *([name] if name else []), is_flag=True, help=words)


def file_option(option: str, metavar: str, words: str, *, name: str | None = None) -> Option:
    """Return an option for a path, which need not exist; see :func:`flag` for ``words`` and ``name``."""
    return click.option(option, *([name] if name else []), type=ANY_PATH, metavar=metavar, help=words)


def together(*options: Option) -> Option:
    """Return these options as one, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


workers_option: Option = click.option(
    "--workers",
    type=click.IntRange(0, 4096),
    help="Number of processes; 0 works in this one.  [default: the usable CPUs]",
)
LOADER_OPTIONS: tuple[Option, ...] = (
    click.option(
        "--transform",
        type=click.Choice(("train", "eval", "none")),
        default="train",
        help="Random or centre crops; none delivers the encoded bytes.",
    ),
    click.option("--size", "pixels", type=click.IntRange(min=1), default=224, help="Side of a crop."),
    click.option("--batch-size", type=click.IntRange(min=1), default=256),
    click.option(
        "--shuffle",
        type=Parsed("shuffle", _shuffle),
        default="10000",
        metavar="WINDOW|none|global",
        help="Shuffle window: a number of records, or bytes such as 2GiB.",
    ),
)
"""The options ``transform``, ``pixels``, ``batch_size`` and ``shuffle``."""


def progress_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--progress`` and ``--quiet`` to a command, which gets a CommandProgress as ``progress``."""

    @click.option(
        "--progress",
        "form",
        type=click.Choice(FORMS),
        default="auto",
        help="Show a bar, or plain lines for a log; auto shows a bar on a terminal, else lines.",
    )
    @flag("--quiet", "Show no progress; same as --progress never.")
    @wraps(command)
    def with_progress(*arguments: Any, form: str, quiet: bool, **options: Any) -> Any:
        return command(*arguments, progress=progress_in("never" if quiet else form), **options)

    return with_progress


cache_options = together(
    file_option(
        "--cache", "FOLDER", "Folder on a local disk to cache the files of a URL in, shared by all datasets."
    ),
    click.option(
        "--cache-limit",
        type=SIZE,
        help="Largest size of the cache, such as 200GiB.  [default: the free space of the disk]",
    ),
)
"""The options ``cache``, which a URL needs, and ``cache_limit``; a folder takes neither."""
output_options = together(progress_option, json_option)
work_options = together(workers_option, output_options)


def transfer_options(*, at_once: int, timeout_s: int, without: str) -> Option:
    """Return ``--at-once``, ``--retries`` and ``--timeout``, the time ``without`` progress of a request."""
    return together(
        click.option(
            "--at-once",
            type=click.IntRange(1, 256),
            default=at_once,
            help="Number of files at the same time.",
        ),
        click.option(
            "--retries",
            type=click.IntRange(0, 1000),
            default=10,
            help="Number of times to retry a failed request.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(0, 3600, min_open=True),
            default=timeout_s,
            metavar="SECONDS",
            help=f"Time without {without} after which a request fails.",
        ),
    )


def transform_of(name: str, pixels: int) -> Transform | None:
    """Return the transform of that name; the evaluation crop is 7/8 of the shorter side, as 224 of 256."""
    from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform  # start-up time: OpenCV

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None


def check_replaced(file: Path | None) -> None:
    """Raise OperationError if the file cannot be written or replaced; called before the work begins."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise OperationError("its folder does not exist; make it, or choose another path", path=file)
    if (file.parent / INDEX_NAME).exists():
        raise OperationError(
            "is in the folder of a dataset, which it would damage; choose another path", path=file
        )
    check_replaceable(file)
    if not os.access(file.parent, os.W_OK):
        raise OperationError("cannot be written; choose another path", path=file)
