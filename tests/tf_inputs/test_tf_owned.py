"""Inputs cannot be copied, and continue after an attempt."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardprep.loaders import Loader
from shardprep.loaders.tf_inputs import QueueInput, ZMQInput
from support.loader_workers import Tagging
from support.owners import assert_refuses_copies, files_opened_afterwards, temporary_folder
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import WHOLE, Made


@pytest.mark.parametrize("make", torture_except(WHOLE.values(), WHOLE["staging-1"]), ids=WHOLE.keys())
def test_an_input_refuses_to_be_copied_and_goes_on(make: Made, lmdb_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with (
        temporary_folder(tmp_path) as temporary,
        Loader(lmdb_shards, batch_size=4, workers=1, transform=Tagging(), slots=20, read_ahead=0) as loader,
        make(loader) as made,
        closing(iter(made)) as batches,  # type: ignore[type-var]
    ):
        next(batches)
        assert_refuses_copies(made, temporary)
        with files_opened_afterwards(tmp_path / "files"):
            assert sum(1 for _ in batches) == len(loader) - 1
            made.close()
            loader.close()
            gc.collect()


PARTS: dict[str, Callable[[QueueInput], object]] = {
    "feeder": lambda each: each._feeder,
    "sink": lambda each: each._sink,
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_part_of_an_input_refuses_too(part: Callable[[QueueInput], object], tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as temporary, QueueInput([np.zeros(3)] * 5) as made:
        next(iter(made))

        assert_refuses_copies(part(made), temporary)


def test_an_input_over_the_wire_refuses_too(tmp_path: Path) -> None:
    signature = tf.TensorSpec([3], tf.float32)
    with temporary_folder(tmp_path) as temporary, ZMQInput("tcp://127.0.0.1:*", signature) as made:
        assert_refuses_copies(made, temporary)
