"""A part of a loader's trace as a picture: what each process did, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from shardprep.formats.pages.shown_text import shown_name

from .run_values import list_in, number_in, text_in

MOST_EVENTS = 600  # that are drawn; the page has some 100 bytes of each
MOST_TRACKS = 17  # the consumer and 16 workers
COLOURS = 6  # classes s0 to s5 of the style sheet; further names share the last
LEFT, WIDTH, ROW, BAR = 70, 570, 24, 18  # of the view
WAITING = "waiting"
KINDS = ("stage", "consumer")


class TracedSpan(NamedTuple):
    """What a process did from ``began`` for ``lasted`` microseconds."""

    track: int
    name: str
    began: float
    lasted: float


def timeline(trace: Any) -> Markup:
    """Return a picture of 600 spans in the middle of a Chrome trace of a loader.

    Raises KeyError, TypeError, ValueError or AttributeError for values of another form.
    """
    events = list_in(trace["traceEvents"])
    names = {event["tid"]: text_in(event["args"]["name"]) for event in events if _names_a_track(event)}
    found = [_span(event) for event in events if event["ph"] == "X" and event["cat"] in KINDS]
    spans = _middle(found)
    if not spans:
        return Markup("<p>The trace has no span.</p>")
    tracks = sorted({span.track for span in spans})[:MOST_TRACKS]
    began = min(span.began for span in spans)
    lasted = max(span.began + span.lasted for span in spans) - began or 1.0
    classes = _classes(span.name for span in spans)
    drawn = [
        _drawn(span, tracks.index(span.track), (span.began - began) / lasted, span.lasted / lasted, classes)
        for span in spans
        if span.track in tracks
    ]
    texts = [_row_name(row, names.get(track, str(track))) for row, track in enumerate(tracks)]
    height = ROW * len(tracks) + 20
    part = " from the middle of the trace" if len(spans) < len(found) else ""
    text = f"{lasted / 1e6:.2f} seconds{part}, {len(drawn):,} spans of {len(tracks)} threads and processes."
    return Markup(
        '<p>{}</p>{}<div class="timeline"><svg role="img" viewBox="0 0 {} {}"><title>Timeline</title>'
        "<desc>{}</desc>{}</svg></div>"
    ).format(
        text,
        _legend(classes),
        LEFT + WIDTH,
        height,
        text,
        Markup("").join([*texts, *drawn, *_axis(lasted, height)]),
    )


def _names_a_track(event: Any) -> bool:
    return bool(event["ph"] == "M" and event["name"] == "thread_name")


def _span(event: Any) -> TracedSpan:
    return TracedSpan(
        int(event["tid"]), text_in(event["name"]), number_in(event["ts"]), number_in(event["dur"])
    )


def _middle(spans: Sequence[TracedSpan]) -> Sequence[TracedSpan]:
    ordered = sorted(spans, key=lambda span: span.began)
    first = max(0, (len(ordered) - MOST_EVENTS) // 2)
    return ordered[first : first + MOST_EVENTS]


def _classes(names: Iterable[str]) -> dict[str, str]:
    """The class of each name, in the order of their first spans; waiting is not filled."""
    found = dict.fromkeys(names)
    filled = [name for name in found if name != WAITING]
    return {name: f"s{min(number, COLOURS - 1)}" for number, name in enumerate(filled)} | (
        {WAITING: "idle"} if WAITING in found else {}
    )


def _drawn(span: TracedSpan, row: int, began: float, lasted: float, classes: dict[str, str]) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
        classes[span.name], LEFT + began * WIDTH, row * ROW + 2, max(lasted * WIDTH, 0.3), BAR
    )


def _row_name(row: int, name: str) -> Markup:
    return Markup('<text x="0" y="{}">{}</text>').format(row * ROW + 16, name[:14])


def _axis(lasted: float, height: int) -> list[Markup]:
    return [
        Markup('<text class="{}" x="{:.0f}" y="{}">{:.2f} s</text>').format(
            "end" if part == 1 else "", LEFT + part * WIDTH, height - 4, part * lasted / 1e6
        )
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def _legend(classes: dict[str, str]) -> Markup:
    rows = [
        Markup(
            '<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{}" width="10" height="10"/></svg>{}</li>'
        ).format(kind, shown_name(name, 40))
        for name, kind in classes.items()
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(rows))
