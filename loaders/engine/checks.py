"""Checks of an engine's options."""

from __future__ import annotations

import math
import multiprocessing

from shardprep.formats.errors import UsageError
from shardprep.formats.processes.process_start import refuse_in_main_import
from shardprep.loaders.buffers.slots import MIN_SLOTS
from shardprep.loaders.engine.protocol.messages import MAX_LEASE_BYTES
from shardprep.loaders.engine.protocol.task import RowTask


def check_engine(work: RowTask, *, workers: int, slots: int, chunk: int, deadline: float | None) -> None:
    """Raise UsageError for options that are not valid, and where no worker can be started."""
    no_deadline = deadline is not None and not 0 < deadline < math.inf
    if workers < 0 or slots < MIN_SLOTS or chunk < 1 or no_deadline:
        raise UsageError(
            f"workers={workers}, slots={slots}, chunk={chunk}, deadline={deadline}: there must be at least "
            f"0 workers, {MIN_SLOTS} slots and 1 row in a chunk, and a deadline above 0"
        )
    if workers:
        refuse_in_main_import()
    if workers and multiprocessing.current_process().daemon:
        raise UsageError(
            "a daemonic process cannot have workers of its own; use workers=0 (a map with threads) in it"
        )
    if work.item_dtype.hasobject or work.item_dtype.itemsize > MAX_LEASE_BYTES:
        raise UsageError(
            f"{work.item_dtype} is not a dtype of plain values of at most {MAX_LEASE_BYTES} bytes"
        )
