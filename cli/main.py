"""The command ``prep``: its sub-commands, and how each error becomes one line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import NoReturn

import click

from ..formats.errors import ShardprepError
from .convert import convert
from .demo import demo
from .inspect import inspect
from .repair import repair
from .sample import sample
from .verify import verify

COULD_NOT, INTERRUPTED, TERMINATED = 3, 130, 143


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("shardprep"), prog_name="prep")
def cli() -> None:
    """From the official archives of an image dataset to verified shards to the training step.

    Exit codes: 0 done; 1 the data is damaged or incomplete; 2 wrong usage; 3 could not check or do
    (I/O, permissions, space); 4 a format version that this release does not know; 130 or 143
    interrupted.
    """


for command in (sample, convert, verify, repair, inspect, demo):
    cli.add_command(command)


class Terminated(BaseException):
    """SIGTERM came: unwind, so that workers end and locks are given back."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def main() -> NoReturn:
    """Run ``prep`` on the command line's words and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the exit would try, and complain, once more
        code = COULD_NOT if isinstance(error, BrokenPipeError) else _failed(explain(error), COULD_NOT)
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run ``prep`` on these words; the exit code. Every error becomes one line on stderr."""
    try:
        code = cli.main(args=list(words), prog_name="prep", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted; the same command goes on from here", INTERRUPTED)
    except Terminated:
        return _failed("terminated; the same command goes on from here", TERMINATED)
    except ShardprepError as error:
        return _failed(str(error), error.exit_code)
    except BrokenPipeError:
        return COULD_NOT
    except OSError as error:
        return _failed(explain(error), COULD_NOT)


def explain(error: OSError) -> str:
    """An operating system's error as one line that names the file and what to do."""
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = "the disk is full; make room and run the same command again"
    elif error.errno == errno.EFBIG:
        text = "the file would get larger than the system allows (ulimit -f)"
    return ": ".join(str(part) for part in (error.filename, text) if part)


def _failed(message: str, code: int) -> int:
    click.echo(f"prep: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
