"""A context that records what a loader's processes do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardprep.loaders.engine.trace import KEEP, Trace

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader


@contextmanager
def tracing(loader: Loader, *, keep: int = KEEP) -> Iterator[Trace]:
    """Record what ``loader`` does within the context; the trace stays valid after it, and after the loader.

    ``keep`` is how many of the last spans of each kind are kept. One trace at a time: a second one ends the
    first.
    """
    engine = loader.engine
    trace = engine.record(keep=keep)
    try:
        yield trace
    finally:
        engine.stop_recording(trace)
