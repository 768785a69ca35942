"""Which tests run: a few of many cases, where all of them take too long, and those whose tools are there."""

import os
import random
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs leave to mount"
)


def sampled(cases: Sequence[Case], count: int) -> list[Case]:
    """The first case, the last one and ``count - 2`` of those between, in order; the same in each run."""
    between = range(1, len(cases) - 1)
    chosen = sorted(random.Random(count).sample(between, min(len(between), count - 2)))
    return [cases[0], *(cases[n] for n in chosen), cases[-1]]


def torture_except(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test; only those that are kept are in the default suite."""
    values = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [case if case in kept else pytest.param(*each, marks=pytest.mark.torture) for case, each in values]
