"""One measurement of a source of batches: its rate, its CPU, its first batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from measuring.processes import cpu_seconds, descendants, own_memory


@dataclass(frozen=True)
class Rate:
    """Images per second, delivered; CPU microseconds per image of all processes and of the main one.

    ``first`` is the seconds to the first batch, ``memory`` the bytes of the largest child process.
    """

    images: float
    cpu: float
    main: float
    first: float
    memory: int


def measure(batches: Iterator[int], *, seconds: float, warm_up: float) -> Rate:
    """Draw batches (their numbers of images) for a time that begins ``warm_up`` seconds after the first."""
    began = perf_counter()
    next(batches)
    first = perf_counter() - began
    _draw(batches, warm_up)
    children, start = descendants(os.getpid()), perf_counter()
    before = [cpu_seconds(pid) for pid in (os.getpid(), *children)]
    images = _draw(batches, seconds)
    passed = perf_counter() - start
    after = [cpu_seconds(pid) for pid in (os.getpid(), *children)]
    spent = [(b - a) / images * 1e6 for a, b in zip(before, after, strict=True)]
    memory = max(map(own_memory, children), default=0)
    return Rate(images / passed, sum(spent), spent[0], first, memory)


def _draw(batches: Iterator[int], seconds: float) -> int:
    end = perf_counter() + seconds
    images = 0
    for count in itertools.takewhile(lambda _: perf_counter() < end, batches):
        images += count
    return images
