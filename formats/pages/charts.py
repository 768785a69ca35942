"""Charts as inline SVG, each with a text alternative and the numbers behind it in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from .shown_text import shown_name, shown_number, shown_short

WIDTH, HEIGHT = 360, 190  # of the view; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 38
MOST_TABLE_ROWS = 100
Show = Callable[[float], str]


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    title: str,
    axis: str,
    show: Show = shown_number,
    counted: str = "images",
) -> Markup:
    """Return a histogram: ``counts`` [n] between ``edges`` [n + 1], in bars of equal width.

    ``title`` and ``axis`` say what it shows and what the edges are, ``counted`` what is counted; ``show``
    writes an edge."""
    most = max([*counts, 1])
    step = (WIDTH - LEFT - RIGHT) / max(len(counts), 1)
    drawn = [_bar(LEFT + number * step, step, count / most) for number, count in enumerate(counts) if count]
    ticks = [(LEFT + at * step, show(edges[at])) for at in _spread(len(counts))]
    rows = [
        (f"{show(low)} to {show(high)}" if low < high else show(low), f"{count:,}")
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    text = f"{sum(counts):,} {counted} from {show(edges[0])} to {show(edges[-1])}; at most {most:,} in a bar."
    if edges[0] == edges[-1]:
        text = f"{sum(counts):,} {counted}, all with {show(edges[0])}."
        middle, width = LEFT + step / 2, step / 16
        drawn, ticks = [_bar(middle - width / 2, width, 1.0)], [(middle, show(edges[0]))]
    return chart_figure(
        title, text, [*drawn, *ticks_across(ticks), *_up(most), axis_name(axis)], (axis, counted), rows
    )


def scatter(
    points: Sequence[Sequence[float]], *, title: str, x: str, y: str, show_y: Show = shown_short
) -> Markup:
    """Return a scatter plot of positive ``points`` [n][2] on logarithmic axes called ``x`` and ``y``."""
    across, up = _Log([p[0] for p in points]), _Log([p[1] for p in points])
    dots = "".join(
        f"M{LEFT + across.share(a) * (WIDTH - LEFT - RIGHT):.0f} {height_of(up.share(b)):.0f}h0"
        for a, b in points
    )
    ticks = [(LEFT + across.share(t) * (WIDTH - LEFT - RIGHT), shown_short(t)) for t in across.ticks()]
    marks = [
        Markup('<text class="tick end" x="{}" y="{:.0f}">{}</text>').format(
            LEFT - 5, height_of(up.share(t)) + 4, show_y(t)
        )
        for t in up.ticks()
    ]
    drawn = [Markup('<path class="dots" d="{}"/>').format(dots), *ticks_across(ticks), *marks, axis_name(x)]
    text = f"{len(points):,} images; {x} from {shown_number(across.low)} to {shown_number(across.high)}, "
    text += f"{y} from {show_y(up.low)} to {show_y(up.high)}; both axes are logarithmic."
    rows = [(shown_number(a), show_y(b)) for a, b in points[:MOST_TABLE_ROWS]]
    return chart_figure(title, text, drawn, (x, y), rows)


def bars(values: Iterable[tuple[str, float]], *, title: str, axis: str, show: Show = shown_number) -> Markup:
    """Return horizontal bars, one for each name and value, with the values; ``axis`` says what they are."""
    values = list(values)
    most = max([value for _, value in values] + [0]) or 1
    rows = [
        Markup(
            '<tr><th scope="row">{}</th><td class="bar"><svg viewBox="0 0 100 8" preserveAspectRatio="none" '
            'aria-hidden="true"><rect class="mark" width="{:.1f}" height="8"/></svg></td><td class="value">{}</td></tr>'
        ).format(shown_name(name, 40), 100 * value / most, show(value))
        for name, value in values
    ]
    head = Markup(
        '<thead><tr><th scope="col">name</th><th scope="col" colspan="2">{}</th></tr></thead>'
    ).format(axis)
    return Markup('<table class="bars"><caption>{}</caption>{}<tbody>{}</tbody></table>').format(
        title, head, Markup("").join(rows)
    )


class _Log:
    """A logarithmic scale that holds all values; those that are not positive stand at its beginning."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self.low, self.high = min(positive), max(positive)
        self._low = math.log10(self.low) - 0.05
        self._span = math.log10(self.high) + 0.05 - self._low

    def share(self, value: float) -> float:
        return (math.log10(max(value, self.low)) - self._low) / self._span

    def ticks(self) -> list[float]:
        """Return round values, about four."""
        decades = range(math.floor(self._low), math.ceil(self._low + self._span) + 1)
        for parts in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
            found = [p * 10.0**d for d in decades for p in parts if self.low <= p * 10.0**d <= self.high]
            if len(found) >= 3:
                return found[:: -(-len(found) // 5)]
        return list(dict.fromkeys((self.low, self.high)))


def chart_figure(
    title: str, text: str, drawn: Sequence[Markup], names: tuple[str, str], rows: Sequence[tuple[str, str]]
) -> Markup:
    """Return a figure with what is ``drawn``, a text alternative, and a table of ``rows`` under two names."""
    table = Markup("").join(
        Markup("<tr><td>{}</td><td>{}</td></tr>").format(*row) for row in rows[:MOST_TABLE_ROWS]
    )
    return Markup(
        '<figure class="chart"><figcaption>{title}</figcaption>'
        '<svg role="img" viewBox="0 0 {width} {height}"><title>{title}</title><desc>{text}</desc>{drawn}</svg>'
        '<details><summary>Numbers<span class="aside"> of {title}</span></summary><p>{text}</p>'
        '<table><thead><tr><th scope="col">{first}</th><th scope="col">{second}</th></tr></thead>'
        "<tbody>{table}</tbody></table></details></figure>"
    ).format(
        title=title, text=text, width=WIDTH, height=HEIGHT, drawn=Markup("").join(drawn),
        first=names[0], second=names[1], table=table,
    )  # fmt: skip


def height_of(share: float) -> float:
    """The place of a share of the whole height, from above."""
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _bar(left: float, width: float, share: float) -> Markup:
    top = min(height_of(share), HEIGHT - BOTTOM - 1)  # one of few is seen, too
    return Markup('<rect class="mark" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        left + 0.5, top, max(width - 1, 0.5), HEIGHT - BOTTOM - top
    )


def _spread(count: int) -> list[int]:
    """Edges that get a text: the first, the last, and some between."""
    return sorted({round(part * count / 4) for part in range(5)})


def ticks_across(ticks: Sequence[tuple[float, str]]) -> list[Markup]:
    """Return the line below a chart, and texts at places from the left."""
    line = Markup('<path class="line" d="M{} {}H{}"/>').format(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT)
    texts = [
        Markup('<text class="tick {}" x="{:.0f}" y="{}">{}</text>').format(
            "end" if x > WIDTH - RIGHT - 25 else "middle", min(x, WIDTH - 4), HEIGHT - BOTTOM + 14, text
        )
        for x, text in ticks
    ]
    return [line, *texts]


def _up(most: float) -> list[Markup]:
    return [
        Markup('<text class="tick end" x="{}" y="{:.0f}">{}</text>').format(
            LEFT - 5, height_of(share) + 4, shown_short(round(most * share))
        )
        for share in ((0.0, 1.0) if most < 2 else (0.0, 0.5, 1.0))
    ]


def axis_name(text: str) -> Markup:
    """Return the name of the line below a chart."""
    return Markup('<text class="axis middle" x="{:.0f}" y="{}">{}</text>').format(
        (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text
    )
