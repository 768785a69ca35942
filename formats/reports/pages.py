"""Self-contained HTML pages with charts as inline SVG, which make no request.

The templates are in ``templates/``. Text from files is sanitized before it is shown.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from shardprep.formats.errors import printable
from shardprep.formats.runtime.progress import count_of, format_number, format_size, round_step


def format_name(text: object, most: int = 80, *, breaks: bool = False) -> Markup:
    """Return a name from a file as HTML: printable, of at most ``most`` characters, with isolated direction.

    A longer name has up to 1,000 characters in its tooltip. With ``breaks``, lines may break after a slash.
    """
    whole, short = printable(str(text)), printable(str(text), most)
    tip = Markup(' title="{}"').format(whole) if whole != short else ""
    return Markup("<bdi{}>{}</bdi>").format(tip, Markup("/<wbr>").join(short.split("/")) if breaks else short)


def format_share(value: float) -> str:
    """Return a fraction in percent; only 0 is shown as 0%, and only 1 as 100%.

    >>> format_share(0.5), format_share(0.00001), format_share(1.0), format_share(0.9999)
    ('50%', 'under 0.1%', '100%', '99.9%')
    """
    if 0 < value < 0.001:
        return "under 0.1%"
    percent = min(value * 100, 99.9) if value < 1 else 100.0
    return f"{percent:.3g}%"


def format_short(number: float) -> str:
    """Return a number in a few characters, for an axis.

    >>> format_short(1280000), format_short(64512), format_short(999), format_short(999700)
    ('1.28M', '64.5k', '999', '1M')
    """
    for unit, size, least in (("G", 1e9, 9.995e8), ("M", 1e6, 9.995e5), ("k", 1e3, 1e4)):
        if number >= least:
            return f"{number / size:.3g}{unit}"
    return format_number(number)


def picture_uri(file: bytes) -> Markup:
    """Return a PNG or JPEG file as a data URI, for the ``src`` of a picture."""
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return Markup("data:image/{};base64,{}").format(kind, base64.b64encode(file).decode("ascii"))


def escape_value(value: object) -> object:
    """Return a template's value with any text made printable, bounded and escaped."""
    if isinstance(value, Markup):
        return value
    return escape(printable(value)) if isinstance(value, str) else value


WIDTH, HEIGHT = 360, 190  # of the view box, which the page scales
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 10, 38
MAX_TABLE_ROWS = 100
Show = Callable[[float], str]


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    title: str,
    axis: str,
    show: Show = format_number,
    counted: str = "images",
) -> Markup:
    """Return a histogram of ``counts`` [n] between ``edges`` [n + 1], in bars of equal width.

    ``axis`` names the edges, ``counted`` the things counted; ``show`` formats an edge.
    """
    most, show = max([*counts, 1]), _telling_apart(edges, show)
    step = (WIDTH - LEFT - RIGHT) / max(len(counts), 1)
    drawn = [_bar(LEFT + number * step, step, count / most) for number, count in enumerate(counts) if count]
    ticks = _choose_ticks([(LEFT + at * step, edge, show(edge)) for at, edge in enumerate(edges)])
    rows = [
        (f"{show(low)} to {show(high)}" if low < high else show(low), f"{count:,}")
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    text = f"{counted.capitalize()}: {sum(counts):,}, "
    if edges[0] < edges[-1]:
        text += f"from {show(edges[0])} to {show(edges[-1])}; at most {most:,} in a bar."
    else:
        text += f"all with {show(edges[0])}."
        middle, width = LEFT + step / 2, step / 16
        drawn, ticks = [_bar(middle - width / 2, width, 1.0)], [(middle, show(edges[0]))]
    up = [(count / most, format_short(count)) for count in sorted({0, most // 2, most})]
    return _figure(title, text, drawn, ticks, up, (axis, counted), rows)


def _telling_apart(values: Sequence[float], show: Show) -> Show:
    """Return ``show``, or a more exact format if its texts of different values are equal."""
    different = set(values)
    return show if len(set(map(show, different))) == len(different) else "{:,.10g}".format


def _choose_ticks(ticks: Sequence[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """Choose from ticks (place, value, text) both ends and the roundest ones whose texts do not touch."""

    def roundness(tick: tuple[float, float, str]) -> tuple[int, bool]:
        digits = f"{tick[1]:.3e}".partition("e")[0].replace(".", "").rstrip("0")
        return len(digits), not digits.endswith(("1", "2", "5"))

    chosen: dict[tuple[float, float], tuple[float, str]] = {}
    for place, _, text in (ticks[0], ticks[-1], *sorted(ticks[1:-1], key=roundness)):
        width = 6.5 * len(text)
        left = place - (width if _is_at_end(place) else width / 2)
        if all(left > end + 8 or left + width + 8 < begin for begin, end in chosen):
            chosen[left, left + width] = place, text
    return sorted(chosen.values())


def scatter(
    points: Sequence[Sequence[float]], *, title: str, x: str, y: str, show_y: Show = format_short
) -> Markup:
    """Return a scatter plot of positive ``points`` [n][2] on logarithmic axes called ``x`` and ``y``."""
    across, up = _Log([p[0] for p in points]), _Log([p[1] for p in points])
    dots = "".join(f"M{left_of(across.share(a)):.0f} {height_of(up.share(b)):.0f}h0" for a, b in points)
    show_x, show_y = _telling_apart(across.ticks(), format_short), _telling_apart(up.ticks(), show_y)
    ticks = [(left_of(across.share(t)), show_x(t)) for t in across.ticks()]
    marks = [(up.share(t), show_y(t)) for t in up.ticks()]
    drawn = [Markup('<path class="dots" d="{}"/>').format(dots)]
    text = f"Images: {len(points):,}, {x} from {format_number(across.low)} to {format_number(across.high)}, "
    text += f"{y} from {format_number(up.low)} to {format_number(up.high)}; both axes are logarithmic, with outliers at their ends."
    rows = [(format_number(a), format_number(b)) for a, b in points[:MAX_TABLE_ROWS]]
    return _figure(title, text, drawn, ticks, marks, (x, y), rows)


def bars(values: Iterable[tuple[str, float]], *, title: str, axis: str, show: Show = format_number) -> Markup:
    """Return a horizontal bar for each name and value; ``axis`` names the values."""
    values = list(values)
    most = max([value for _, value in values] + [0]) or 1
    return Markup(render("bars", values=values, most=most, title=title, axis=axis, show=show))  # noqa: S704 - it escapes


class _Log:
    """A logarithmic scale; outliers (one of 200 values at each end) are placed at its ends."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = sorted(value for value in values if value > 0) or [1.0]
        outliers = len(positive) // 200
        self.low, self.high = positive[outliers], positive[-1 - outliers]
        self._low = math.log10(self.low) - 0.05
        self._span = math.log10(self.high) + 0.05 - self._low

    def share(self, value: float) -> float:
        return (math.log10(min(max(value, self.low), self.high)) - self._low) / self._span

    def ticks(self) -> list[float]:
        """Return about four round values."""
        decades = range(math.floor(self._low), math.ceil(self._low + self._span) + 1)
        for parts in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)):
            values = [p * 10.0**d for d in decades for p in parts if self.low <= p * 10.0**d <= self.high]
            if len(values) >= 3:
                return values[:: -(-len(values) // 5)]
        return list(dict.fromkeys((self.low, self.high)))


def _figure(
    title: str,
    text: str,
    drawn: Sequence[Markup],
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
    names: tuple[str, str],
    rows: Sequence[tuple[str, str]],
) -> Markup:
    """Return a figure: ``drawn`` shapes above an axis, a text alternative, and a table of ``rows``.

    ``across`` are tick labels below, at x coordinates; ``up`` are those on the left, at shares of the height.
    ``names`` head the table's columns, and name the axes.
    """
    base = HEIGHT - BOTTOM
    ticks: list[tuple[str, float, float, str]] = [
        ("end" if _is_at_end(x) else "middle", min(x, WIDTH - 4), base + 16, label) for x, label in across
    ]
    ticks += [("end", LEFT - 5, height_of(share) + 4, label) for share, label in up]
    places = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "base": base}
    values = {"title": title, "text": text, "drawn": drawn, "ticks": ticks, "names": names}
    return Markup(render("figure", top=TOP, **places, **values, rows=rows[:MAX_TABLE_ROWS]))  # noqa: S704 - it escapes


def left_of(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def height_of(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _bar(left: float, width: float, share: float) -> Markup:
    top = min(height_of(share), HEIGHT - BOTTOM - 1)  # at least one unit, to stay visible
    return Markup('<rect class="mark" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        left + 0.5, top, max(width - 1, 0.5), HEIGHT - BOTTOM - top
    )


def _is_at_end(x: float) -> bool:
    """Whether a text at this x must end there, as it would leave the chart."""
    return x > WIDTH - RIGHT - 25


MAX_TICKS = 6


def line_chart(
    points: Sequence[tuple[float, float]],
    *,
    title: str,
    x: str,
    y: str,
    show_y: Show = format_number,
    dotted: bool = False,
    mark: tuple[float, str] | None = None,
) -> Markup:
    """Return a line through ``points`` [n][2], ascending in x, on axes ``x`` and ``y`` that start at zero.

    ``dotted`` also marks each point and labels its x. ``mark`` is a point's x, and a word to write beside it.
    """
    most_x, most_y = max(a for a, _ in points) or 1.0, max(b for _, b in points) or 1.0
    top = round_step(most_y)

    def place(a: float, b: float) -> tuple[float, float]:
        return left_of(a / most_x), height_of(b / top)

    places = [place(a, b) for a, b in points]
    line = "M" + "L".join(f"{left:.1f} {up:.1f}" for left, up in places)
    drawn = [Markup('<path class="course" d="{}"/>').format(line)]
    if dotted:
        dots = "".join(f"M{left:.1f} {up:.1f}h0" for left, up in places)
        drawn.append(Markup('<path class="points" d="{}"/>').format(dots))
    if mark:
        left, up = place(mark[0], dict(points)[mark[0]])
        beside = up + 24 if up + 24 < height_of(0) - 4 else up - 12  # above the point near the bottom
        drawn += [
            Markup('<circle class="marked" cx="{:.1f}" cy="{:.1f}" r="6"/>').format(left, up),
            Markup('<text class="word middle" x="{:.1f}" y="{:.1f}">{}</text>').format(
                min(max(left, LEFT + 20), WIDTH - 25), beside, mark[1]
            ),
        ]
    step = round_step(most_x / (MAX_TICKS - 1))
    across = [a for a, _ in points] if dotted else [n * step for n in range(int(most_x / step) + 1)]
    ticks = [(place(a, 0)[0], format_number(a)) for a in across[:: -(-len(across) // MAX_TICKS)]]
    marks = [(part, show_y(top * part)) for part in (0.0, 0.5, 1.0)]
    text = f"{y} by {x}: at most {show_y(most_y)}, last {show_y(points[-1][1])}."
    rows = [(format_number(a), show_y(b)) for a, b in points]
    return _figure(title, text, drawn, ticks, marks, (x, y), rows)


FILTERS: dict[str, Callable[..., object]] = {
    "name": format_name,
    "with_words": lambda one: f"{one['name']} ({one['words']})" if one["words"] else one["name"],
    "printable": printable,
    "size": format_size,
    "number": format_number,
    "whole": lambda value: format_number(round(value)),
    "share": format_share,
    "counted": count_of,
    "uri": picture_uri,
}
"""Filters of templates; also globals, to pass to charts."""


def page(template: str, *, title: str, **values: Any) -> str:
    """Render a template in ``templates/`` (named without ``.html``), which extends ``base.html``.

    The page includes its style. Its content security policy allows only this style and pictures as data: no
    script, no style attribute, no request. Text of ``values`` is escaped and made printable. The footer has
    the version, the day (of ``SOURCE_DATE_EPOCH``, if set) and the command; otherwise equal values give equal
    pages.
    """
    style = (resources.files(__package__) / "templates" / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    css = Markup(style)  # noqa: S704 - the package's own file
    day = time.strftime("%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())))
    made_by = [f"shardprep {version('shardprep')}", day]
    program = Path(*sys.argv[:1])  # an embedded interpreter has none
    if program.name == "prep" or program.parts[-2:] == ("shardprep", "__main__.py"):
        made_by.append(shlex.join(["prep", *sys.argv[1:]]))
    return render(template, title=title, style=css, policy=policy, made_by=made_by, **values)


def render(template: str, **values: Any) -> str:
    """Render a template in ``templates/``. Text of ``values`` is escaped and made printable."""
    return _environment().get_template(f"{template}.html").render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=escape_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= FILTERS | {"histogram": histogram, "scatter": scatter, "bars": bars, "zip": zip}
    return environment
