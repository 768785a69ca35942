"""Options that several commands share, and the cluster that one of them names."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, reduce, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from click.shell_completion import CompletionItem

from shardprep.cli.console.output import PROGRESS_FORMS, json_option, make_progress
from shardprep.formats.errors import MissingExtra, OperationError, UsageError
from shardprep.formats.runtime.files import check_replaceable
from shardprep.formats.runtime.jobs import RayExecutor
from shardprep.formats.runtime.processes import MAX_WORKERS
from shardprep.formats.runtime.progress import parse_bytes
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import refuse_in_dataset
from shardprep.formats.storage.store import Location

if TYPE_CHECKING:
    from shardprep.loaders.order.epoch import Shuffle
    from shardprep.loaders.transforms.contract import Transform

Option = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that adds one or more options to a command."""


class ParsedParam(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A parameter type with a parsing function, whose ValueError, but no other error, is a usage error.

    ``name`` is the value's name in the help; ``completion`` is "file" or "dir" if a shell can complete it.
    """

    def __init__(self, name: str, parse: Callable[[str], object], completion: str | None = None) -> None:
        self.name, self._parse, self._completion = name, parse, completion

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._completion)] if self._completion else []


def _parse_part(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)):
        raise ValueError(f"expected I/N, such as 3/64, not {text!r}")
    number, of = map(int, match.groups())
    if not 1 <= number <= of:
        raise ValueError(f"parts are numbered from 1 to {of}; there is no part {number}")
    return number, of


def _parse_path_or_url(text: str) -> Path | str:
    return Location.parse(text).url if "://" in text else user_path(text)


def _parse_shuffle(text: str) -> Shuffle | None:
    from shardprep.loaders.order.epoch import GlobalShuffle, LocalShuffle  # start-up time: OpenCV

    if text in ("none", "global"):
        return GlobalShuffle() if text == "global" else None
    return LocalShuffle(int(text) if text.isdecimal() else text)


CROPS = ("train", "eval", "none")  # the transforms that have a name
SIZE = ParsedParam("size", parse_bytes)
PART = ParsedParam("part", _parse_part)
FOLDER = ParsedParam("folder", user_path, "dir")
FOLDER_OR_URL = ParsedParam("folder or URL", _parse_path_or_url, "dir")
ANY_PATH = ParsedParam("path", user_path, "file")
PATH_OR_URL = ParsedParam("path or URL", _parse_path_or_url, "file")


class PrepCommand(click.Command):
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
    return click.command(cls=PrepCommand, short_help=summary, epilog="\n".join(lines))


def flag(option: str, words: str, *, name: str | None = None) -> Option:
    """Return a flag with the help ``words``; ``name`` is its parameter, if not the option's name."""
    return click.option(option, *([name] if name else []), is_flag=True, help=words)


def value(option: str, metavar: str, words: str, *, name: str | None = None, **more: Any) -> Option:
    """Return an option for a text; ``more`` is passed to click. See also :func:`flag`."""
    return click.option(option, *([name] if name else []), metavar=metavar, help=words, **more)


file = partial(value, type=ANY_PATH)
"""An option for a path, which need not exist."""


def count(
    option: str, words: str, least: int = 0, *, most: int | None = None, name: str | None = None, **more: Any
) -> Option:
    """Return an option for a whole number; ``more`` is passed to click. See also :func:`flag`."""
    kind = click.IntRange(least, most)
    return click.option(option, *([name] if name else []), type=kind, help=words, **more)


def choice(option: str, values: Sequence[str], words: str, *, name: str | None = None, **more: Any) -> Option:
    """Return an option for one of these values; see :func:`count`."""
    return click.option(option, *([name] if name else []), type=click.Choice(values), help=words, **more)


def combine_options(*options: Option) -> Option:
    """Return these options as one, in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


workers = count(
    "--workers",
    "Number of processes; 0 works in this one where that is safe.  [default: the usable CPUs]",
    most=MAX_WORKERS,
)
LOADER: tuple[Option, ...] = (
    choice("--transform", CROPS, "Random or centre crops; none delivers the encoded bytes.", default="train"),
    count("--size", "Side of a crop.", 1, name="pixels", default=224),
    click.option("--batch-size", type=click.IntRange(min=1), default=256, help="Records in a batch."),
    value(
        "--shuffle",
        "WINDOW|none|global",
        "Shuffle window: a number of records, or bytes such as 2GiB.",
        type=ParsedParam("shuffle", _parse_shuffle),
        default="10000",
    ),
)
"""The options ``transform``, ``pixels``, ``batch_size`` and ``shuffle``."""


def progress(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--progress`` and ``--quiet`` to a command, which gets a CommandProgress as ``progress``."""

    @choice(
        "--progress",
        PROGRESS_FORMS,
        "Show a bar, or plain lines for a log; auto shows a bar on a terminal, else lines.",
        name="form",
        default="auto",
    )
    @flag("--quiet", "Show no progress; same as --progress never.")
    @wraps(command)
    def with_progress(*arguments: Any, form: str, quiet: bool, **options: Any) -> Any:
        return command(*arguments, progress=make_progress("never" if quiet else form), **options)

    return with_progress


cache = combine_options(
    file(
        "--cache", "FOLDER", "Folder on a local disk to cache the files of a URL in, shared by all datasets."
    ),
    click.option(
        "--cache-limit",
        type=SIZE,
        help="Largest size of the cache, such as 200GiB.  [default: the free space of the disk]",
    ),
)
"""The options ``cache``, which a URL needs, and ``cache_limit``; a folder takes neither."""
output = combine_options(progress, json_option)
work = combine_options(workers, output)


def transfer(call: Callable[..., Any], *, without: str) -> Option:
    """Return ``--at-once``, ``--retries`` and ``--timeout`` (``without`` progress), as in ``call``."""
    own = {name: each.default for name, each in signature(call).parameters.items()}
    return combine_options(
        count("--at-once", "Number of files at the same time.", 1, most=256, default=own["at_once"]),
        count("--retries", "Number of times to retry a failed request.", most=1000, default=own["retries"]),
        value(
            "--timeout",
            "SECONDS",
            f"Time without {without} after which a request fails.",
            name="timeout_s",
            type=click.FloatRange(0, 3600, min_open=True),
            default=f"{own['timeout_s']:g}",
        ),
    )


def make_transform(name: str, pixels: int) -> Transform | None:
    """Return the transform of that name; the evaluation crop is 7/8 of the shorter side, as 224 of 256."""
    from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform  # start-up time: OpenCV

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None


def check_output_files(*files: Path | None) -> None:
    """Raise OperationError if a file cannot be written or replaced; called before the work begins.

    Raises UsageError for a file in the folder of a dataset, or if two of the files are the same.
    """
    paths = [file for file in files if file is not None]
    for file in paths:
        if not file.parent.is_dir():
            raise OperationError("its folder does not exist; make it, or choose another path", path=file)
        refuse_in_dataset(file)
        check_replaceable(file)
        if not os.access(file.parent, os.W_OK):
            raise OperationError("cannot be written; choose another path", path=file)
        if sum(file.resolve() == other.resolve() for other in paths) > 1:
            raise UsageError("is the path of two outputs; give each its own", path=file)


CONNECT_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 2
PORTS = dict.fromkeys(("tcp", "tls", "ws", "wss", "ucx"), 0) | {"ray": 10001}  # defaults; Dask has none

cluster: Option = value(
    "--cluster",
    "ADDRESS",
    "Work on a cluster: the Dask scheduler at tcp://HOST:PORT, Ray at ray://HOST:PORT, or auto for Ray "
    "on this machine. --workers is then the number of shards at a time.",
)


def cluster_executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """Return a connection to the cluster, whose context is an executor; None without an address."""
    if address is None:
        return nullcontext()
    logging.disable(logging.CRITICAL)  # engines log tracebacks; failures are raised by the work anyway
    is_ray = address == "auto" or address.startswith("ray://")
    return _ray_executor(address) if is_ray else _dask_executor(address)


@contextmanager
def _dask_executor(address: str) -> Iterator[Executor]:
    try:
        import distributed  # start-up time, and only with the extra dask
    except ImportError as error:
        raise MissingExtra.of("--cluster tcp://", "Dask", "dask") from error
    engine: Any = distributed  # typed only where mypy finds it
    try:
        _check_reachable(address)
        client = engine.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except OSError as error:  # a TimeoutError, too
        raise OperationError(f"no Dask scheduler answers at {address}; check that it is running") from error
    try:
        yield client.get_executor()
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)


@contextmanager
def _ray_executor(address: str) -> Iterator[Executor]:
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else Ray starts a local cluster when this one is lost
    try:
        import ray  # start-up time, and only with the extra ray
    except ImportError as error:
        raise MissingExtra.of(f"--cluster {address}", "Ray", "ray") from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address)
        for pause_s in (1, 3, 0):
            try:
                ray.init(address, log_to_driver=False)
                break
            except ConnectionAbortedError:  # a young cluster may not serve clients yet
                if not pause_s:
                    raise
                time.sleep(pause_s)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OperationError(
            f"no Ray cluster answers at {address} ({reason}); check that it is running"
        ) from error
    except RuntimeError as error:  # a different version of Ray or Python
        raise OperationError(f"the Ray cluster at {address} cannot be used: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own
    executor = RayExecutor()
    is_interrupted = False
    try:
        yield executor
    except BaseException as error:
        is_interrupted = not isinstance(error, Exception)
        raise
    finally:
        if not is_interrupted:  # a thread of Ray may wait for this one, and the process ends anyway
            executor.shutdown(wait=False)
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise UsageError for an invalid address, OSError if nothing listens: engines would try for long."""
    if address == "auto":
        return
    with suppress(ValueError, KeyError):
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        default = PORTS[parts.scheme]
        if parts.hostname and (port := parts.port or default):
            if parts.scheme != "ucx":  # it may not listen on TCP
                socket.create_connection((parts.hostname, port), CONNECT_TIMEOUT_S).close()
            return
    raise UsageError(
        f"{address!r} is not a cluster address, such as tcp://host:8786, ray://host:10001 or auto"
    )
