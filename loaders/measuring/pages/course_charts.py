"""The rate, the queue and the waiting of a run over its time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from shardprep.formats.pages.line_chart import line_chart
from shardprep.formats.pages.shown_text import shown_share

from .run_values import CoursePart, RunValues

if TYPE_CHECKING:
    from markupsafe import Markup

BATCHES = 4  # in a point of a chart; fewer would draw the batches, and not the rate
SECONDS = "seconds since the first batch"


def course_charts(run: RunValues) -> list[Markup]:
    """Return the charts; none of a run with fewer than two whole parts of the time."""
    parts = run.course[:-1]  # the last one is not over
    if len(parts) < 2:
        return []
    together = min(ceil(BATCHES * len(parts) / max(1, sum(part.batches for part in parts))), len(parts) // 2)
    width = run.part_seconds * together
    parts = tuple(
        _joined(parts[first : first + together]) for first in range(0, len(parts) - together + 1, together)
    )
    times = [part.began + width / 2 for part in parts]
    rates = [part.rows / width for part in parts]
    waits = [min(1.0, part.waited / width) for part in parts]
    queue = [part.ready for part in parts]
    return [
        line_chart(list(zip(times, rates, strict=True)), title="Rate", x=SECONDS, y=f"{run.unit}/s"),
        line_chart(
            list(zip(times, queue, strict=True)), title="Queue", x=SECONDS, y="batches that are ready"
        ),
        line_chart(
            list(zip(times, waits, strict=True)),
            title="Waiting of the step",
            x=SECONDS,
            y="share of the time",
            show_y=shown_share,
        ),
    ]


def _joined(parts: Sequence[CoursePart]) -> CoursePart:
    """Return what came in several parts, one after the other."""
    batches = sum(part.batches for part in parts)
    return CoursePart(
        began=parts[0].began,
        batches=batches,
        rows=sum(part.rows for part in parts),
        ready=sum(part.ready * part.batches for part in parts) / max(1, batches),
        waited=sum(part.waited for part in parts),
    )
