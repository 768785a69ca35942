"""Inputs cannot be copied, and continue after an attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardprep.loaders.tf_inputs import QueueInput
from support.owners import assert_refuses_copies, temporary_folder

PARTS: dict[str, Callable[[QueueInput], object]] = {
    "feeder": lambda each: each._feeder,
    "sink": lambda each: each._sink,
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_part_of_an_input_refuses_too(part: Callable[[QueueInput], object], tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as temporary, QueueInput([np.zeros(3)] * 5) as made:
        next(iter(made))

        assert_refuses_copies(part(made), temporary)
