"""The stages of a run as a small bar chart of HTML, for a notebook."""

from __future__ import annotations

import html
from typing import Any

from shardprep.formats.printable import printable

from .run_values import RunValues, ShownStage

MOST_IN_NAME = 40
BAR, LIMIT_BAR = "#0072b2", "#c0392b"
CELL = "text-align: left; padding: 0 0.6em 0 0"


def load_chart(values: dict[str, Any]) -> str:
    """Return a chart of the stages' shares of the time, from ``to_dict()`` of stats; the limit is marked.

    It is of HTML alone, without a script. Names are shown as text, in at most 40 characters.
    """
    run = RunValues.of(values)
    rows = "".join(_row(stage, limits=stage.name == run.limits) for stage in run.stages)
    text = run.sentence or "nothing is known before the second batch"
    return f"<table>{rows}</table><p>{html.escape(printable(text))}</p>"


def _row(stage: ShownStage, *, limits: bool) -> str:
    name = html.escape(printable(stage.name, MOST_IN_NAME))
    colour, word = (LIMIT_BAR, f'<b style="color: {LIMIT_BAR}">limits</b>') if limits else (BAR, "")
    bar = f"width: {10 * stage.share:.2f}em; height: 0.8em; background: {colour}"
    cells = (name, f'<div style="width: 10em"><div style="{bar}"></div></div>', f"{stage.share:.0%}", word)
    shown = "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
    return f"<tr>{shown}</tr>"
