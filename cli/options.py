"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..formats import OperationError
from ..formats.sizes import parse_bytes


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


def check_place(file: Path | None) -> None:
    """Fail before the work rather than after it where its result cannot be written."""
    if file and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OperationError("cannot be written; name another place", path=file)
