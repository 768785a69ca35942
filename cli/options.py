"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}": base ** (power + 1)
    for infix, base in (("B", 1000), ("iB", 1024), ("", 1024))
    for power, prefix in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """A size in bytes from "256MiB", "1GB", "64K" (K, M, G, T alone are powers of 1024), "4096".

    >>> parse_bytes("256MiB"), parse_bytes("1.5 GB"), parse_bytes("64K")
    (268435456, 1500000000, 65536)
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    units = {name.upper(): factor for name, factor in UNITS.items()}
    if not match or match[2].upper() not in units:
        raise ValueError(f"{text!r} is not a size such as 256MiB")
    return int(Fraction(match[1]) * units[match[2].upper()])


class ByteSize(click.ParamType[int]):
    """A number of bytes with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Folder(click.ParamType[Path]):
    """A folder that is there. Unlike click's type, tells what must not be looked at from what is not there."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            self.fail(f"{path} does not exist", param, ctx)
        if not stat.S_ISDIR(mode):
            self.fail(f"{path} is not a folder", param, ctx)
        return path


FOLDER = Folder()
ANY_PATH = click.Path(readable=False, path_type=Path)

Command = Callable[..., Any]

json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
workers_option: Callable[[Command], Command] = click.option(
    "--workers",
    type=click.IntRange(0, 4096),
    help="Parallel processes; 0 works in this one.  [default: the CPUs at hand]",
)
