"""Functions for maps in processes, defined here so that a worker can import them without a framework."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.loaders import ArraySpec
from support.loader_workers import OwnError

OUTPUTS = (ArraySpec("values", (2, 3), "float32"), ArraySpec("number", (), "int64"))


def pair(number: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], np.int64]:
    """A random array, and the item."""
    return rng.random((2, 3), np.float32), np.int64(number)


def named(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """The same as a dict."""
    values, same = pair(number, rng)
    return {"values": values, "number": same}


def pair_but_17(number: int) -> tuple[npt.NDArray[np.float32], np.int64]:
    if number == 17:
        raise OwnError("this one not")
    return np.zeros((2, 3), np.float32), np.int64(number)


def slow_item(number: int) -> tuple[npt.NDArray[np.uint8], int]:
    time.sleep(0.005)
    return np.zeros(8, np.uint8), number


def process_of(seconds: float) -> int:
    """The process that makes this item, which takes so long."""
    time.sleep(seconds)
    return os.getpid()
