"""The command ``prep``: its sub-commands, and the conversion of errors to one line and an exit code."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

import click

from shardprep.cli.commands.bench_disk import bench_disk
from shardprep.cli.commands.bench_loader import bench_loader
from shardprep.cli.commands.convert import convert
from shardprep.cli.commands.demo import demo
from shardprep.cli.commands.inspect import inspect
from shardprep.cli.commands.keygen import keygen
from shardprep.cli.commands.repair import repair
from shardprep.cli.commands.sample import sample
from shardprep.cli.commands.serve import serve
from shardprep.cli.commands.verify import verify
from shardprep.cli.console.output import say
from shardprep.formats.errors import ShardprepError
from shardprep.formats.printable import printable
from shardprep.formats.system import full_disk

EXIT_OPERATION_FAILED = 3

ADVICE = {
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


def run(arguments: Sequence[str]) -> int:
    """Run ``prep`` with these arguments and return the exit code. Every error becomes one line on stderr.

    This does not use click's own ``main``, which exits with 1, silently, for every EPIPE.
    """
    try:
        with cli.make_context("prep", list(arguments)) as context:
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
        return report_os_error(error)
    except MemoryError:
        return failed("there is not enough memory for this; work with fewer --workers", EXIT_OPERATION_FAILED)


def failed(message: str, code: int) -> int:
    """Print the message as one printable line to stderr, if that is open, and return the code."""
    with suppress(OSError):
        say(f"prep: {' '.join(message.split())}", err=True)
    return code


def report_os_error(error: OSError) -> int:
    """Report an error of the system, unless the reader of the output is gone, and return the exit code."""
    if not (isinstance(error, BrokenPipeError) and _output_is_closed()):
        failed(explain(error), EXIT_OPERATION_FAILED)
    return EXIT_OPERATION_FAILED


def explain(error: OSError) -> str:
    """Return an error of the system as one line that names the file and what to do."""
    if isinstance(error, BrokenPipeError):
        return "a process that was started for the work ended at once; run the same command again"
    text = ADVICE.get(error.errno or 0) or error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        text = full_disk.advice(error.filename)
    return ": ".join(printable(str(part)) for part in (error.filename, text) if part)


def flush(code: int) -> int:
    """Flush the streams and return the code, or another one if the results could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the exit tries again
            code = report_os_error(error) if stream is sys.stdout else code
    return code


def _with_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{error.format_message()} (see {context.command_path if context else 'prep'} --help)"


def _output_is_closed() -> bool:
    """Whether the reader of stdout or stderr is gone, rather than the reader of another pipe."""
    poller = select.poll()
    for descriptor in (1, 2):
        poller.register(descriptor, 0)  # errors are always reported
    return bool(poller.poll(0))
