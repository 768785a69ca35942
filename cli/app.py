"""The command ``prep``: its sub-commands, and how errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

import click
from click.shell_completion import shell_complete

from shardprep.cli.commands.bench import bench_disk, bench_loader
from shardprep.cli.commands.convert import convert, index, join
from shardprep.cli.commands.datasets import collect, export, inspect, repair, verify
from shardprep.cli.commands.demo import demo, sample
from shardprep.cli.commands.network import fetch, keygen, publish, serve
from shardprep.cli.commands.replay import prove, replay
from shardprep.cli.commands.report import find, gate, report
from shardprep.cli.console.output import CommandError, describe_failure, is_json_requested
from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.runtime.processes import NOTHING_STARTS

COMPLETE_VARIABLE = "_PREP_COMPLETE"  # set by the shell functions that click generates

GROUPS = {
    "Prepare": (demo, sample, convert, index, join, collect),
    "Check and repair": (verify, repair, gate),
    "Explore": (inspect, report, find),
    "Transfer": (publish, fetch, export),
    "Train": (bench_disk, bench_loader, replay, prove, serve, keygen),
}


class TitledGroups(click.Group):
    """All commands; the help lists them under the titles of GROUPS, with the summaries in one column."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # click would sort them

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                room = formatter.width - 6 - width
                formatter.write_dl(
                    [(f"{each.name:{width}}", each.get_short_help_str(room)) for each in commands]
                )


@click.group(
    cls=TitledGroups,
    commands=[command for commands in GROUPS.values() for command in commands],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(version("shardprep"), prog_name="prep")
def cli() -> None:
    """Turn image archives into verified shards, and feed them to training.

    Exit codes: 0 done; 1 the data is damaged or incomplete; 2 wrong usage; 3 a system error
    (I/O, permissions, space); 4 a format version that this release does not know; 129, 130 or
    143 interrupted.
    """


def run(arguments: Sequence[str]) -> int:
    """Run ``prep`` with these arguments and return the exit code.

    Every error becomes one line on stderr, and with ``--json`` also an object on stdout. Shell completion is
    answered here, too. Click's own ``main`` is not used: it exits with 1, silently, on every EPIPE.
    """
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return shell_complete(cli, {}, "prep", COMPLETE_VARIABLE, instruction)
    as_json = is_json_requested(arguments)
    try:
        with cli.make_context("prep", list(arguments)) as context:
            code: int | None = cli.invoke(context)
        return code or 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return error.exit_code
    except (click.ClickException, ShardprepError, OSError, ImportError, MemoryError) as error:
        return report_error(error, as_json=as_json)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        return report_error(OperationError(NOTHING_STARTS), as_json=as_json)


def report_error(error: CommandError, *, as_json: bool = False) -> int:
    """Report an error, unless the output has lost its reader, and return its exit code."""
    failure = describe_failure(error)
    if not isinstance(error, BrokenPipeError):
        failure.report(as_json=as_json)
    return failure.exit_code


def flush(code: int) -> int:
    """Flush stdout and stderr; return the exit code, changed if the results could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else the exit flushes again
            code = report_error(error) if stream is sys.stdout and code != 3 else code  # 3: reported already
    return code
