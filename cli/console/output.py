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


def size(count: float) -> str:
    """Return a number of bytes in decimal units, as for disks and rates.

    >>> size(999), size(123456), size(147.9e9)
    ('999 B', '123.5 KB', '147.9 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.95 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError  # pragma: no cover - the loop ends at GB


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count_of(1, "shard"), count_of(1281167, "image"), count_of(2, "class")
    ('1 shard', '1,281,167 images', '2 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


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
