"""Faults found by a hostile review of the loader, and the effects of wrong parameters."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import OperationError, UsageError
from shardprep.loaders import Loader, LocalShuffle, TrainTransform, WorkFailed
from support import loader_workers
from support.sampling import torture_except


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([1, 2], 1))
def test_a_transform_that_exits_is_told_and_does_not_end_the_training(
    lmdb_shards: Path, workers: int
) -> None:
    with (
        Loader(lmdb_shards, batch_size=16, transform=loader_workers.exit_program, workers=workers) as loader,
        pytest.raises(WorkFailed, match="SystemExit") as raised,
    ):
        list(loader)

    assert loader.key(0).split("_")[0].split("/")[0][0] in str(raised.value)
    assert loader.stats().restarts == 0


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


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_told_at_once(lmdb_shards: Path, deadline: float) -> None:
    with pytest.raises(UsageError, match="deadline"):
        Loader(lmdb_shards, batch_size=8, workers=1, deadline=deadline)


def test_a_window_may_be_any_integer_and_nothing_else() -> None:
    assert LocalShuffle(np.int64(50)) == LocalShuffle(50)  # type: ignore[arg-type]
    for wrong in (2.5, None, "much"):
        with pytest.raises(UsageError, match="window"):
            LocalShuffle(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [1.5, None])
def test_a_rank_is_a_whole_number(lmdb_shards: Path, rank: object) -> None:
    with pytest.raises(UsageError, match="rank"):
        Loader(lmdb_shards, workers=0, rank=rank, world_size=3)  # type: ignore[arg-type]
