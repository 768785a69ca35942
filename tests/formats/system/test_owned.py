"""An owner of a descriptor, map, socket, thread or process cannot be copied, and releases only its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.errors import OutputBusy
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.runtime.workers import Child, WorkerPool
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.remote import RemoteSource
from support.engine_workers import Writing, layout

ANY_PORT = "tcp://127.0.0.1:*"


GoOn = Callable[[], object]


@contextmanager
def engine(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with (
        Engine(Writing(), layout(4), workers=1) as made,
        closing(made.run([np.arange(4)] * 20)) as batches,
    ):  # type: ignore[type-var]
        next(batches)
        yield made, lambda: sum(1 for _ in batches) == 19


@contextmanager
def remote(path: Path, folder: Path) -> Iterator[tuple[object, GoOn]]:
    with RemoteSource(ANY_PORT) as made:
        yield made, lambda: made.stats().batches == 0


# What may be copied


# In a forked copy of the process


def in_a_forked_copy(check: Callable[[], bool]) -> bool:
    """Return the output of ``check`` in the forked copy."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = not check()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_a_forked_copy_that_closes_an_owner_leaves_the_original_alone(tmp_path: Path) -> None:
    with Child() as made, WorkerPool(1) as workers, WorkFolder(tmp_path / "output") as place:
        workers.submit(abs, 1).result()

        def check() -> bool:
            made.kill()
            made.__exit__()
            place.__exit__(None, None, None)
            return True

        assert in_a_forked_copy(check)
        assert made.call(divmod, 7, 2) == (3, 1)
        assert workers.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(OutputBusy):
            WorkFolder(tmp_path / "output").__enter__()
        place.remove()
