"""A chart of a value over another, as a line from zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from .charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Show,
    axis_name,
    chart_figure,
    height_of,
    ticks_across,
)
from .shown_text import shown_number

MOST_TICKS = 6


def line_chart(
    points: Sequence[tuple[float, float]],
    *,
    title: str,
    x: str,
    y: str,
    show_x: Show = shown_number,
    show_y: Show = shown_number,
    dotted: bool = False,
    mark: tuple[float, str] | None = None,
) -> Markup:
    """Return a line through ``points`` [n][2], ascending in x, over axes called ``x`` and ``y`` from zero.

    ``dotted`` also marks each point, and names its x. ``mark`` is an x of a point, and a word beside it.
    """
    most_x, most_y = max(a for a, _ in points) or 1.0, max(b for _, b in points) or 1.0
    top = _round_up(most_y)

    def place(a: float, b: float) -> tuple[float, float]:
        return LEFT + a / most_x * (WIDTH - LEFT - RIGHT), height_of(b / top)

    line = "".join(
        f"{'L' if n else 'M'}{left:.1f} {up:.1f}" for n, (left, up) in enumerate(map(place, *_two(points)))
    )
    drawn = [Markup('<path class="course" d="{}"/>').format(line)]
    if dotted:
        dots = "".join(f"M{left:.1f} {up:.1f}h0" for left, up in map(place, *_two(points)))
        drawn.append(Markup('<path class="points" d="{}"/>').format(dots))
    if mark:
        drawn += _marked(*place(mark[0], dict(points)[mark[0]]), mark[1])
    across = [a for a, _ in points] if dotted else _round_steps(most_x)
    ticks = [(place(a, 0)[0], show_x(a)) for a in across[:: -(-len(across) // MOST_TICKS)]]
    up = [
        Markup('<text class="tick end" x="{}" y="{:.0f}">{}</text>').format(
            LEFT - 5, height_of(part) + 4, show_y(top * part)
        )
        for part in (0.0, 0.5, 1.0)
    ]
    text = f"{y} by {x}: at most {show_y(most_y)}, last {show_y(points[-1][1])}."
    rows = [(show_x(a), show_y(b)) for a, b in points]
    return chart_figure(title, text, [*drawn, *ticks_across(ticks), *up, axis_name(x)], (x, y), rows)


def _two(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [a for a, _ in points], [b for _, b in points]


def _round_up(value: float) -> float:
    """The next value of 1, 1.5, 2, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(
        power * digit for digit in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if power * digit >= value * (1 - 1e-9)
    )


def _round_steps(most: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, up to the most: at most five beside zero."""
    least = most / (MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
    return [number * step for number in range(int(most / step) + 1)]


def _marked(left: float, up: float, word: str) -> list[Markup]:
    """A ring around a point, and the word below it, or above it near the line below the chart."""
    below = up + 24 if up + 24 < height_of(0) - 4 else up - 12
    return [
        Markup('<circle class="marked" cx="{:.1f}" cy="{:.1f}" r="6"/>').format(left, up),
        Markup('<text class="word middle" x="{:.1f}" y="{:.1f}">{}</text>').format(
            min(max(left, LEFT + 20), WIDTH - 25), below, word
        ),
    ]
