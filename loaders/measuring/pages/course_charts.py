"""The rate, the queue and the waiting of a run over its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardprep.formats.pages.line_chart import line_chart
from shardprep.formats.pages.shown_text import shown_share

from .run_values import RunValues

if TYPE_CHECKING:
    from markupsafe import Markup

SECONDS = "seconds since the first batch"


def course_charts(run: RunValues) -> list[Markup]:
    """Return the charts; none of a run with fewer than two whole parts of the time."""
    parts, width = run.course[:-1], run.part_seconds  # the last one is not over
    if len(parts) < 2:
        return []
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
