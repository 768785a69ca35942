"""The shared parts of the checks of from-tensorpack.md: their names, and the values of its items."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from shardprep.loaders import Flow
from support.tensorpack_page import Ran

ALL, FIRST_50 = list(range(100)), list(range(50))  # the labels of the page's two flows

Check = Callable[[Ran], None]


def of(*rows: str) -> Callable[[Check], Check]:
    """Mark the check of the rows that begin with these names."""

    def marked(check: Check) -> Check:
        check.rows = rows  # type: ignore[attr-defined]
        return check

    return marked


def checks_in(*modules: ModuleType) -> list[tuple[str, Check]]:
    """The marked checks, with the names of their rows."""
    found = (check for module in modules for check in vars(module).values())
    return [(row, check) for check in found for row in getattr(check, "rows", ())]


def labels_of(flow: Any, *, scale: float = 1) -> list[int]:
    """The labels, after checking that their images belong to them."""
    found = []
    for image, label in flow:
        assert image.shape == (8, 8, 3)
        assert np.allclose(np.asarray(image) * scale, label)
        found.append(int(label))
    return found


def rows_of(batches: Any, *, scale: float = 1) -> list[list[int]]:
    """The labels of each batch, with the same check."""
    return [labels_of(zip(*map(np.asarray, batch[:2]), strict=True), scale=scale) for batch in batches]


def in_eights(numbers: list[int]) -> list[list[int]]:
    return [numbers[first : first + 8] for first in range(0, len(numbers), 8)]


def assert_shuffled(flow: Flow, expected: list[int]) -> None:
    """Check that each pass has each item once, in another order."""
    one, other = labels_of(flow), labels_of(flow)
    assert sorted(one) == sorted(other) == expected
    assert len({tuple(one), tuple(other), tuple(expected)}) == 3
