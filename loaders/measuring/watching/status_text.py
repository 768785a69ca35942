"""The state of a running loader or flow in a few lines of a given width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tqdm.utils import disp_len

from .last_minute import LastMinute

if TYPE_CHECKING:
    from shardprep.loaders.loader.bottleneck import StageLoad
    from shardprep.loaders.loader.shards_ahead.local_shards import ShardLevels

LEVELS = "▁▂▃▄▅▆▇█"
LEAST_SHARE = 0.005  # of the time; a stage below it is not shown


def rate_line(minute: LastMinute, width: int, *, sparkline: bool) -> str:
    """Return the rate of the last minute, its course and the stage that limits, as far as they fit.

    Empty before anything is known.
    """
    verdict = minute.stats.verdict
    if verdict is None:
        return ""
    rate = f"{verdict.rate:,.0f} {verdict.unit}/s"
    over, limits = f" over {minute.seconds:.0f} s", f", {verdict.limit} limits"
    course = f" {curve(minute.rates, 12)}" if sparkline and len(minute.rates) > 1 else ""
    texts = (rate + over + course + limits, rate + course + limits, rate + limits)
    return longest(texts, width) or rate


def stages_line(loads: Sequence[StageLoad], width: int) -> str:
    """Return the stages with the shares of the time in which they work; the busiest, where not all fit."""
    shown = [load for load in loads if load.utilisation >= LEAST_SHARE]
    while shown and disp_len(text := "  ".join(map(_share, shown))) > width:
        least = min(shown, key=lambda load: load.utilisation)
        shown = [load for load in shown if load is not least]
    return text if shown else ""


def queue_line(levels: Sequence[int], capacity: int, waiting: float, width: int, *, sparkline: bool) -> str:
    """Return how many batches are ready, their course, and the share of the time that the step waited."""
    now = f"queue {levels[-1]} of {capacity} slots"
    course = f" {curve(levels, 12, most=capacity)}" if sparkline and len(levels) > 1 else ""
    waited = f", the step waits {waiting:.0%}"
    return longest((now + course + waited, now + waited), width) or now


def storage_line(shards: ShardLevels, rate: float, width: int, *, sparkline: bool) -> str:
    """Return how far downloads are beside the epoch, and how many bytes come in a second.

    >>> from shardprep.loaders.loader.shards_ahead.local_shards import ShardLevels
    >>> storage_line(ShardLevels(total=40, begun=10, ahead=20), 118e6, 80, sparkline=True)
    'storage ███▒▒▒▒▒▒░░░ 10 of 40 shards begun, 20 ahead, 118.0 MB/s'
    """
    name, count = "storage ", f"{shards.begun} of {shards.total} shards begun, {shards.ahead} ahead"
    bar = f"{_bar(shards, 12)} " if sparkline and shards.total else ""
    speed = f", {rate / 1e6:,.1f} MB/s"
    texts = (name + bar + count + speed, name + count + speed, name + count)
    return longest(texts, width) or f"{name}{shards.begun} of {shards.total}"


def _bar(shards: ShardLevels, width: int) -> str:
    begun = width * shards.begun // shards.total
    there = width * (shards.begun + shards.ahead) // shards.total
    return "█" * begun + "▒" * (there - begun) + "░" * (width - there)


def longest(texts: Iterable[str], width: int) -> str:
    """Return the first text that fits; empty for none."""
    return next((text for text in texts if disp_len(text) <= width), "")


def curve(values: Iterable[float], width: int, *, most: float | None = None) -> str:
    """Return the last values as bars of text, the mean of several in each where there are more than fit.

    >>> curve([1, 2, 4, 8], 4), curve([0, 0, 8, 8], 2)
    ('▁▂▄█', '▁█')
    """
    found = np.fromiter(values, float)
    parts = np.array_split(found, min(width, len(found)))
    heights = np.array([part.mean() for part in parts]) / max(most or found.max(), 1e-9)
    return "".join(LEVELS[int(level)] for level in np.clip(np.ceil(heights * 8) - 1, 0, 7))


def _share(load: StageLoad) -> str:
    return f"{load.name} {load.utilisation:.0%}"
