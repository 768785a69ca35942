"""Functions for maps in processes, defined here so that a worker can import them without a framework."""

from typing import Any

import numpy as np
import numpy.typing as npt


def pair(number: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], np.int64]:
    """A random array, and the item."""
    return rng.random((2, 3), np.float32), np.int64(number)


def named(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """The same as a dict."""
    values, same = pair(number, rng)
    return {"values": values, "number": same}
