"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from shardprep.formats import OperationError
from shardprep.formats.dataset.remote.open_dataset import cache_for, refuse_cache
from shardprep.formats.system.atomic_write import check_replaceable
from shardprep.formats.system.sizes import parse_bytes
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.user_path import user_path

from .progress import FORMS, form_of

if TYPE_CHECKING:
    from shardprep.loaders import Transform
    from shardprep.loaders.order.epoch_order import Shuffle


class ByteSize(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PartOfAll(click.ParamType["tuple[int, int]"]):
    """A part and the number of parts, counted from 1: ``3/64``."""

    name = "part"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        if not (found := re.fullmatch(r"(\d{1,9})/(\d{1,9})", value, re.ASCII)):
            self.fail(f"expected I/N, such as 3/64, not {value!r}", param, ctx)
        number, of = map(int, found.groups())
        if not 1 <= number <= of:
            self.fail(f"parts are counted from 1: of {of} there is no part {number}", param, ctx)
        return number, of


class Folder(click.ParamType[Path]):
    """An existing folder. A folder without permission is an OSError; click's type reports it as missing."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = user_path(value)
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            self.fail(f"{path} does not exist", param, ctx)
        if not stat.S_ISDIR(mode):
            self.fail(f"{path} is not a folder", param, ctx)
        return path

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class FolderOrUrl(Folder):
    """An existing folder, or the URL of a dataset in object storage or on a server."""

    name = "folder or URL"

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        if isinstance(value, str) and "://" in value:
            return Location.parse(value).url
        return super().convert(value, param, ctx)


class UserPath(click.Path):
    """Any path; a ``~`` that the shell left, as in ``--save=~/x``, is the home folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return super().convert(user_path(value), param, ctx)  # type: ignore[return-value]


class PathOrUrl(click.ParamType["Path | str"]):
    """A path, or the URL of a place in object storage or on a server."""

    name = "path or URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if isinstance(value, str) and value.partition("://")[1]:
            return Location.parse(value).url
        return ANY_PATH.convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


FOLDER = Folder()
FOLDER_OR_URL = FolderOrUrl()
ANY_PATH = UserPath(readable=False, path_type=Path)
PATH_OR_URL = PathOrUrl()

Command = Callable[..., Any]

json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
workers_option: Callable[[Command], Command] = click.option(
    "--workers",
    type=click.IntRange(0, 4096),
    help="Parallel processes; 0 works in this one.  [default: the CPUs at hand]",
)


def examples(*lines: str) -> str:
    """Return the end of a command's help: what to type, as it is typed."""
    return "\n".join(("\b", "Examples:", *(f"  prep {line}" for line in lines)))


def progress_option(command: Command) -> Command:
    """Add ``--progress`` and ``--quiet`` to a command; it gets them as ``form``, of type Form."""

    @click.option(
        "--progress",
        "shown",
        type=click.Choice(FORMS),
        default="auto",
        show_default=True,
        help="A bar, or plain lines for a log. auto: a bar on a terminal, else lines.",
    )
    @click.option("--quiet", is_flag=True, help="Show no progress, as --progress never does.")
    @wraps(command)
    def with_form(*arguments: Any, shown: str, quiet: bool, **options: Any) -> Any:
        return command(*arguments, form=form_of("never" if quiet else shown), **options)

    return with_form


@dataclass(frozen=True)
class CacheOptions:
    """What ``--cache`` and ``--cache-limit`` say; both None where they are not given."""

    cache: Path | None
    cache_limit: int | None

    def check(self, dataset: Path | str) -> None:
        """Raise UsageError for a URL without a cache, and for a folder with one."""
        if isinstance(dataset, str):
            cache_for(dataset, self.cache)
        else:
            refuse_cache(dataset, self.cache, self.cache_limit)


def cache_options(command: Command) -> Command:
    """Add ``--cache`` and ``--cache-limit`` to a command; it gets them as ``through``."""

    @click.option(
        "--cache",
        type=ANY_PATH,
        metavar="FOLDER",
        help="Where the files of a URL are cached: a folder on a local disk, shared by all datasets.",
    )
    @click.option(
        "--cache-limit",
        type=ByteSize(),
        help="The most bytes that the cache has, such as 200GiB.  [default: what the disk has]",
    )
    @wraps(command)
    def with_cache(*arguments: Any, cache: Path | None, cache_limit: int | None, **options: Any) -> Any:
        return command(*arguments, through=CacheOptions(cache, cache_limit), **options)

    return with_cache


def transfer_options(*, at_once: int, timeout_s: int, without: str) -> Callable[[Command], Command]:
    """Return what adds ``--at-once``, ``--retries`` and ``--timeout``, with these defaults, to a command.

    A request has failed after ``timeout_s`` seconds ``without`` what it waits for.
    """

    def with_transfer(command: Command) -> Command:
        for option in (
            click.option(
                "--timeout",
                "timeout_s",
                type=click.FloatRange(0, 3600, min_open=True),
                default=timeout_s,
                show_default=True,
                metavar="SECONDS",
                help=f"Without {without}, after which a request has failed.",
            ),
            click.option(
                "--retries",
                type=click.IntRange(0, 1000),
                default=10,
                show_default=True,
                help="How often a request that failed is sent again.",
            ),
            click.option(
                "--at-once",
                type=click.IntRange(1, 256),
                default=at_once,
                show_default=True,
                help="Files at the same time.",
            ),
        ):
            command = option(command)
        return command

    return with_transfer


def check_writable(file: Path | None) -> None:
    """Raise OperationError, before the work begins, if its result cannot be written to the file."""
    if file and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OperationError("cannot be written; name another place", path=file)


def check_replaced(file: Path | None) -> None:
    """Raise OperationError, before the work begins, if a new file cannot take this place."""
    if file:
        check_writable(file.parent)
        check_replaceable(file)


class ShuffleType(click.ParamType["Shuffle | None"]):
    """A window in records or bytes ("10000", "2GiB"), "global" or "none"."""

    name = "shuffle"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shuffle | None:
        from shardprep.loaders import GlobalShuffle, LocalShuffle  # start-up time: OpenCV

        match value:
            case "none":
                return None
            case "global":
                return GlobalShuffle()
        return LocalShuffle(int(value) if value.isdecimal() else value)


OPTIONS = (
    click.option(
        "--transform",
        type=click.Choice(("train", "eval", "none")),
        default="train",
        show_default=True,
        help="Random or centre crops; none delivers the encoded bytes.",
    ),
    click.option(
        "--size", "pixels", type=click.IntRange(min=1), default=224, show_default=True, help="Side of a crop."
    ),
    click.option("--batch-size", type=click.IntRange(min=1), default=256, show_default=True),
    click.option(
        "--shuffle",
        type=ShuffleType(),
        default="10000",
        show_default=True,
        metavar="WINDOW|none|global",
        help="How far records move: a number, or bytes such as 2GiB.",
    ),
)


def loader_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``transform``, ``pixels``, ``batch_size`` and ``shuffle`` to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def transform_of(name: str, pixels: int) -> Transform | None:
    """Return the transform of that name. The evaluation crop is 7/8 of the shorter side, as 224 of 256."""
    from shardprep.loaders import EvalTransform, TrainTransform  # start-up time: OpenCV

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None
