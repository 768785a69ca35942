"""Transforms for the tests of the loader, defined here so that worker processes can import them."""

import os
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.loaders import ArraySpec, TransformInput
from support.engine_workers import Action


@dataclass(frozen=True)
class Tagging:
    """Return three arrays that depend on record and epoch; act first at some keys (or all, at "")."""

    actions: Mapping[str, Action] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec("crc", (), "uint32"),
            ArraySpec("draw", (2,), "float64"),
            ArraySpec("seen", (), "int64"),
        )

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> tuple[Any, ...]:
        if action := self.actions.get(record.key, self.actions.get("")):
            action()
        return np.uint32(zlib.crc32(record.image)), rng.random(2), np.int64(record.label)

    def shown(self, record: TransformInput, rng: np.random.Generator) -> int:
        return 7  # which is no part of the image


def nothing(record: TransformInput, rng: np.random.Generator) -> None:
    """Return None, as a function without a return statement."""


@dataclass(frozen=True)
class Misdeclared:
    """Return other arrays than it declares."""

    outputs: tuple[ArraySpec, ...] = (ArraySpec("image", (3,), "uint8"),)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> npt.NDArray[Any]:
        return np.zeros(4, np.uint8)


class OwnError(Exception):
    """An error that only this module has."""


def fail() -> None:
    raise OwnError("this one not")


def reject() -> None:
    raise BadImage("does not decode")


def nap() -> None:
    time.sleep(0.002)


@dataclass(frozen=True)
class CutShort:
    """Truncate a file in the middle of an epoch."""

    path: Path

    def __call__(self) -> None:
        self.path.chmod(0o644)
        os.truncate(self.path, 4096)


def report_late_joins() -> None:
    """Report on stderr when a thread is joined while the interpreter ends: a daemon may never run again."""
    join, too_late, say = threading.Thread.join, sys.is_finalizing, os.write

    def reporting(thread: threading.Thread, timeout: float | None = None) -> None:
        if too_late():
            say(2, b"joined too late")
        join(thread, timeout)

    threading.Thread.join = reporting  # type: ignore[assignment, method-assign]


@dataclass(frozen=True)
class Imported:
    """Return whether the worker imported one of these modules."""

    names: tuple[str, ...]

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        return (ArraySpec("imported", (), "bool"),)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> tuple[Any, ...]:
        return (np.bool_(bool({*self.names} & {*sys.modules})),)
