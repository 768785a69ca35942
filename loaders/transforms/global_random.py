"""Global random generators, seeded for one record."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def seeded_globally(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and PyTorch (for CPUs) from ``rng``; restore them after.

    PyTorch's is left alone where it was not imported. Not thread-safe.
    """
    torch = sys.modules.get("torch")
    of_torch = torch.random.default_generator if torch is not None else None
    states = random.getstate(), np.random.get_state(), of_torch and of_torch.get_state()
    words = rng.integers(1 << 32, size=3, dtype=np.uint32)
    try:
        random.seed(int(words[0]))
        np.random.seed(words[1])
        if of_torch is not None:
            of_torch.manual_seed(int(words[2]))
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if of_torch is not None:
            of_torch.set_state(states[2])
