"""Faults found by a hostile review of the loader, and the effects of wrong parameters."""

import os
import signal
from pathlib import Path

import pytest

from shardprep.formats import OperationError, UsageError
from shardprep.loaders import Loader, TrainTransform


def test_a_forked_copy_of_an_iterator_is_refused(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=8, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                next(batches)
            except UsageError:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        rest = sum(1 for _ in batches)

    assert os.waitstatus_to_exitcode(status) == 0
    assert rest == len(loader) - 1


def test_more_slots_than_memory_is_an_error_at_once(lmdb_shards: Path) -> None:
    with pytest.raises(OperationError, match="slots"):
        Loader(lmdb_shards, batch_size=200, transform=TrainTransform(224), workers=1, slots=10**7)


@pytest.mark.parametrize("transform", [TrainTransform, 5, "train"])
def test_what_is_no_transform_is_told_at_once(lmdb_shards: Path, transform: object) -> None:
    with pytest.raises(UsageError, match="callable"):
        Loader(lmdb_shards, batch_size=8, transform=transform, workers=0)  # type: ignore[arg-type]
