"""Text output: numbers, tables and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import click

from shardprep.formats.printable import MOST_CHARACTERS, printable

MOST_IN_LINE = 4 * MOST_CHARACTERS  # an error has a path, a shard, a key and a message


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line of text, made printable, because it may quote names from files."""
    click.echo(printable(text, MOST_IN_LINE), err=err)


def say_next(*words: str | PurePath) -> None:
    """Print the command of ``prep`` to type next, as a shell takes it."""
    say(f"next: prep {shlex.join(map(str, words))}")


def print_fields(fields: Mapping[str, object], indent: str = "  ") -> None:
    """Print names and values in two columns, each made printable and on one line."""
    shown = {printable(name): printable(str(value)) for name, value in fields.items()}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{indent}{name:<{width}}  {value}")


def print_json(value: Any) -> None:
    """Print one JSON object to stdout; its strings are escaped as JSON requires."""
    click.echo(json.dumps(value, indent=2))
