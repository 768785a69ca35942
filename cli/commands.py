"""The command ``prep``: its sub-commands, and how each error becomes one line and an exit code."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

import click

from ..formats.errors import ShardprepError
from .bench_disk import bench_disk
from .bench_loader import bench_loader
from .convert import convert
from .demo import demo
from .inspect import inspect
from .keygen import keygen
from .repair import repair
from .sample import sample
from .serve import serve
from .verify import verify

COULD_NOT = 3

ADVICE = {
    errno.ENOSPC: "the disk is full; make room and run the same command again",
    errno.EDQUOT: "the disk quota is used up; make room and run the same command again",
    errno.EFBIG: "the file would get larger than the system allows; raise ulimit -f",
    errno.EMFILE: "too many open files; raise ulimit -n",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("shardprep"), prog_name="prep")
def cli() -> None:
    """From the official archives of an image dataset to verified shards to the training step.

    Exit codes: 0 done; 1 the data is damaged or incomplete; 2 wrong usage; 3 could not check or do
    (I/O, permissions, space); 4 a format version that this release does not know; 130 or 143
    interrupted.
    """


for command in (sample, convert, verify, repair, inspect, bench_disk, bench_loader, serve, keygen, demo):
    cli.add_command(command)


def run(words: Sequence[str]) -> int:
    """Run ``prep`` on these words; the exit code. Every error becomes one line on stderr.

    Without click's own ``main``, which would exit with 1, silently, for every EPIPE.
    """
    try:
        with cli.make_context("prep", list(words)) as context:
            cli.invoke(context)
        return 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        return failed(_with_hint(error), error.exit_code)
    except ShardprepError as error:
        return failed(str(error), error.exit_code)
    except OSError as error:
        return could_not(error)


def failed(message: str, code: int) -> int:
    """Tell the message in one line on stderr, as far as anybody listens; the code."""
    with suppress(OSError):
        click.echo(f"prep: {' '.join(message.split())}", err=True)
    return code


def could_not(error: OSError) -> int:
    """Tell an operating system's error, unless it is that nobody reads what we write; the code."""
    if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
        failed(explain(error), COULD_NOT)
    return COULD_NOT


def explain(error: OSError) -> str:
    """An operating system's error as one line that names the file and what to do."""
    if isinstance(error, BrokenPipeError):
        return "a process that was started for the work ended at once; run the same command again"
    text = ADVICE.get(error.errno or 0) or error.strerror or str(error)
    return ": ".join(str(part) for part in (error.filename, text) if part)


def flush(code: int) -> int:
    """Empty the streams' buffers; the code, or another where the results could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the exit would try once more
            code = could_not(error) if stream is sys.stdout else code
    return code


def _with_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{error.format_message()} (see {context.command_path if context else 'prep'} --help)"


def _nobody_reads() -> bool:
    """Whether the reader of stdout or stderr is gone, and not a process at another pipe's end."""
    ours = select.poll()
    for descriptor in (1, 2):
        ours.register(descriptor, 0)  # errors are told unasked
    return bool(ours.poll(0))
