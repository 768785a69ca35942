"""Numbers and tables as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click


def size(count: float) -> str:
    """A number of bytes in decimal units, as disks are sold and rates are told.

    >>> size(999), size(123456), size(147.9e9)
    ('999 B', '123.5 KB', '147.9 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.95 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError  # pragma: no cover - the loop ends at GB


def count_of(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "shard"), count_of(1281167, "image"), count_of(2, "class")
    ('1 shard', '1,281,167 images', '2 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def print_fields(fields: Mapping[str, object], indent: str = "  ") -> None:
    """Names and values in two columns."""
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{indent}{name:<{width}}  {value}")


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))
