"""What limits a chain of inputs: the first stage, seen from the step, that does not wait for the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..verdict import HARDLY, OF_STEP, STEP, StageLoad, Verdict, rate_of

if TYPE_CHECKING:
    from .occupancy import InputStats

# A graph's steps are seen only by the empty queue that a batch comes to, most of the time where they wait.
OFTEN = 0.5

STAGES = {"StagingInput": "staging"}
QUEUE = "TensorFlow queue"


def stage_of(stats: InputStats) -> str:
    """What an input is called as a stage."""
    return STAGES.get(stats.name, QUEUE)


def load_of(stats: InputStats) -> StageLoad | None:
    """The input's thread as a stage, per batch: how long it works, waits for its source, and for room."""
    if not stats.batches or stats.elapsed <= 0:
        return None
    seconds = stats.converting / max(1, stats.fed)
    return StageLoad(
        stage_of(stats),
        "thread",
        seconds=seconds,
        utilisation=min(1.0, stats.converting / stats.elapsed),
        starved=min(1.0, stats.fetching / stats.elapsed),
        blocked=min(1.0, stats.blocked_seconds / stats.elapsed),
        limit=rate_of(seconds),
    )


def verdict_of(stats: InputStats) -> Verdict | None:
    """The verdict on everything up to the step that draws from this input."""
    if stats.batches < 2 or stats.elapsed <= 0:
        return None
    images = _rows(stats)
    rate = stats.batches * (images or 1) / stats.elapsed
    unit = "images" if images else "batches"
    name, next_rate, advice = _behind(stats, images or 1.0)
    if not _starved(stats):
        return Verdict(STEP, rate, name, max(rate, next_rate), OF_STEP, unit)
    step = stats.elapsed - stats.waited
    alone = rate_of(step / stats.batches / (images or 1)) if step > 0 and not stats.unseen else rate
    return Verdict(name, rate, STEP, max(rate, alone), advice, unit)


def _starved(stats: InputStats) -> bool:
    if stats.unseen:
        return stats.starved > OFTEN
    return stats.waited > HARDLY * stats.elapsed


def _behind(stats: InputStats, images: float) -> tuple[str, float, str]:
    """What limits those who feed this input, its own thread included: stage, rate, advice."""
    working = rate_of(stats.converting / max(1, stats.fed) / images)
    if stats.fetching <= stats.converting:
        return stage_of(stats), working, "its thread is busy copying; give it arrays that start on 64 bytes"
    if stats.source is not None:
        return _behind(stats.source, images)
    if stats.loader is not None and (found := stats.loader.of_workers()) is not None:
        return found.limit, found.rate, found.advice
    fetched = rate_of(stats.fetching / max(1, stats.fed) / images)
    return "source", fetched, "the source takes its time; a Loader works in several processes"


def _rows(stats: InputStats) -> float:
    """Images per batch, 0 where no Loader tells."""
    inner: InputStats | None = stats
    while inner is not None:
        if inner.loader is not None and inner.loader.batches:
            return inner.loader.rows / inner.loader.batches
        inner = inner.source
    return 0.0
