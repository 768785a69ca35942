"""The HTML page of a loader's or flow's run: its figures, its course and its timeline."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from shardprep.formats.errors import DataError, printable
from shardprep.formats.reports.pages import bars, format_share, line_chart, page
from shardprep.formats.runtime.files import save_bytes
from shardprep.formats.runtime.json_record import parse_as
from shardprep.formats.runtime.progress import count_of, format_number, format_size
from shardprep.formats.runtime.user_paths import user_path
from shardprep.loaders.loader.stats import StageLoad

MAX_PARTS = 1000  # of the time
MAX_STAGES = 100  # the longest flows have a few dozen
COURSE = ("began", "batches", "rows", "ready", "waited")  # values for each part of the time


@dataclass(frozen=True)
class RunValues:
    """A run's ``stages`` in the order of data flow, the name of the one that ``limits``, and a ``sentence``.

    As long as nothing is known, ``limits`` is "" and ``rate`` 0. ``course`` has a column for each of COURSE
    and a row per ``part_seconds``; it is empty if the stats have none, like a flow's.
    """

    stages: tuple[StageLoad, ...]
    limits: str
    rate: float
    unit: str
    sentence: str
    course: npt.NDArray[np.float64]
    part_seconds: float

    @classmethod
    def of(cls, values: Any) -> RunValues:
        """Read ``to_dict()`` of a loader's, flow's or input's stats. Raises DataError for other values."""
        try:
            verdict = values["verdict"] or {"limit": "", "rate": 0.0, "unit": "images", "sentence": ""}
            return cls(
                tuple(map(_parse_stage, parse_as(tuple[Any, ...], values["loads"])[:MAX_STAGES])),
                parse_as(str, verdict["limit"]),
                parse_number(verdict["rate"]),
                parse_as(str, verdict["unit"]),
                parse_as(str, verdict["sentence"]),
                *_parse_course(values),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"these are not the stats of a loader, a flow or an input of this release: {type(error).__name__}: {error}"
            ) from error


def _parse_course(values: Mapping[str, Any]) -> tuple[npt.NDArray[np.float64], float]:
    """Return the parts of the time and their length; for an input, its loader's."""
    while within := values.get("source") or values.get("loader"):
        values = within
    points = parse_as(tuple[Any, ...], values.get("course", []))[:MAX_PARTS]
    parts = [[parse_number(part[name]) for name in COURSE] for part in points]
    seconds = parse_number(points[0]["seconds"]) if points else 0.0
    return np.array(parts).reshape(-1, len(COURSE)), seconds or 1.0


def _parse_stage(load: Mapping[str, Any]) -> StageLoad:
    place: Any = parse_as(str, load["place"])
    shares = {name: parse_number(load[name], most=1.0) for name in ("utilisation", "starved", "blocked")}
    limit = math.inf if load["limit"] is None else parse_number(load["limit"])
    return StageLoad(
        parse_as(str, load["name"]), place, seconds=parse_number(load["seconds"]), limit=limit, **shares
    )


def parse_number(value: object, *, most: float = 1e18) -> float:
    """Return a JSON number. Raises ValueError for other values, and outside of 0 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number of 0 to {most:g}")
    return float(value)


ENOUGH = 0.95  # of a sweep's highest rate; the smallest value that reaches it is the knee
MAX_RUNS = 100

Part = dict[str, Any]


def bench_facts(bench: Mapping[str, Any], stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of the measurements other than the stages."""
    facts = []
    if "first_batch" in bench:
        facts.append(("first batch", f"after {parse_number(bench['first_batch']):.2f} s"))
    elif "warming" in stats:
        facts.append(("first batch", f"waited for {parse_number(stats['warming']):.2f} s"))
    if "gap_p50" in bench:
        p50, p99 = (1e3 * parse_number(bench[name]) for name in ("gap_p50", "gap_p99"))
        facts.append(("between batches", f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"))
    if "bytes_per_second" in bench:
        facts.append(("encoded images", f"{format_size(parse_number(bench['bytes_per_second']))}/s"))
    if "workers" in stats:
        cpus = parse_number(stats["cpus"])
        facts.append(("workers", f"{parse_number(stats['workers']):.0f} on {count_of(round(cpus), 'CPU')}"))
    if stats.get("restarts"):
        facts.append(("workers replaced", f"{parse_number(stats['restarts']):.0f}"))
    return facts


def sweep_part(sweep: Mapping[str, Any] | None) -> Part | None:
    """Return a sweep's plot with the knee marked, and a sentence; None without a sweep."""
    if not sweep:
        return None
    runs = sorted(
        (parse_number(run["value"]), parse_number(run["images_per_second"]))
        for run in parse_as(tuple[Any, ...], sweep["runs"])[:MAX_RUNS]
    )
    option, most = parse_as(str, sweep["option"]).replace("_", " "), max(rate for _, rate in runs)
    knee, rate = next(run for run in runs if run[1] >= ENOUGH * most)
    text = f"{option} {knee:,.0f} reaches {rate:,.0f} images/s"
    less = f", {format_share(rate / most)} of the best rate" if rate < most else ", the best rate"
    chart = line_chart(
        runs, title=f"Rate by {option}", x=option, y="images/s", dotted=True, mark=(knee, "enough")
    )
    return {"text": f"{text}{less}; more adds little or nothing.", "chart": chart}


def disk_part(bench: Mapping[str, Any], disk: Mapping[str, Any] | None) -> Part | None:
    """Return bars that compare the loader's rate with the disk's, and a sentence."""
    rows = []
    if "bytes_per_second" in bench:
        rows.append(("this run, as delivered", parse_number(bench["bytes_per_second"])))
    if disk:
        reads_by_depth = parse_as(tuple[Any, ...], disk["random"])
        patterns = {"the loader's pattern": disk["stream"]} | {
            f"random, {parse_number(reads['queue_depth']):.0f} at once": reads
            for reads in reads_by_depth[:1] + reads_by_depth[1:][-1:]
        }
        rows += [
            (f"{name}, {kind}", parse_number(reads[kind]["median"]))
            for name, reads in patterns.items()
            for kind in ("cold", "warm")
            if reads[kind]
        ]
    against = bench.get("disk") or {}
    if not disk and against:
        rows += [
            (f"the disk, {kind}", parse_number(against[kind])) for kind in ("cold", "warm") if against[kind]
        ]
    if len(rows) < 2:
        return None
    chart = bars(
        rows, title="Encoded images read", axis="bytes per second", show=lambda n: f"{format_size(n)}/s"
    )
    return {"text": parse_as(str, against["sentence"]) if against else "", "chart": chart}


BATCHES = 4  # per point of a chart; fewer would show single batches instead of the rate
SECONDS = "seconds since the first batch"


def course_charts(run: RunValues) -> list[Markup]:
    """Return the charts; none for fewer than two complete parts of the time."""
    parts = run.course[:-1]  # the last one is incomplete
    if len(parts) < 2:
        return []
    together = min(ceil(BATCHES * len(parts) / max(1, parts[:, 1].sum())), len(parts) // 2)
    width, joined = run.part_seconds * together, len(parts) // together
    began, batches, rows, ready, waited = parts[: joined * together].T.reshape(len(COURSE), joined, together)
    times = began[:, 0] + width / 2
    queue = (ready * batches).sum(axis=1) / np.maximum(1, batches.sum(axis=1))
    waits = np.minimum(1.0, waited.sum(axis=1) / width)
    charts = (
        ("Rate", f"{run.unit}/s", rows.sum(axis=1) / width, format_number),
        ("Queue", "batches ready", queue, format_number),
        ("Time the step waits", "share of time", waits, format_share),
    )
    return [
        line_chart(np.stack((times, values), axis=1).tolist(), title=title, x=SECONDS, y=y, show_y=show)
        for title, y, values, show in charts
    ]


MAX_EVENTS = 600  # drawn, with about 100 bytes of the page each
MAX_TRACKS = 17  # the consumer and 16 workers
COLOURS = 6  # classes s0 to s5 of the style sheet; further names share the last one
LEFT, WIDTH, ROW = 100, 540, 24  # of the view
WAITING = "waiting"
KINDS = ("stage", "consumer")


def timeline(trace: Any) -> Part:
    """Return a page's values for the picture of 600 spans from the middle of a loader's Chrome trace.

    Raises KeyError, TypeError, ValueError or AttributeError for anything else.
    """
    events = parse_as(tuple[Any, ...], trace["traceEvents"])
    names = {
        event["tid"]: parse_as(str, event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    events_by_time = [  # times in microseconds
        (parse_number(each["ts"]), parse_number(each["dur"]), int(each["tid"]), parse_as(str, each["name"]))
        for each in events
        if each["ph"] == "X" and each["cat"] in KINDS
    ]
    events_by_time.sort(key=itemgetter(0))
    first = max(0, (len(events_by_time) - MAX_EVENTS) // 2)
    spans = events_by_time[first : first + MAX_EVENTS]
    if not spans:
        return {"bars": []}
    tracks = sorted({track for _, _, track, _ in spans})[:MAX_TRACKS]
    begin = spans[0][0]
    whole = max(began + lasted for began, lasted, _, _ in spans) - begin or 1.0
    filled = dict.fromkeys(name for *_, name in spans if name != WAITING)
    classes = {name: f"s{min(number, COLOURS - 1)}" for number, name in enumerate(filled)}
    if any(name == WAITING for *_, name in spans):
        classes[WAITING] = "idle"
    bars = [
        (
            classes[name],
            LEFT + (began - begin) / whole * WIDTH,
            tracks.index(track) * ROW,
            max(lasted / whole * WIDTH, 0.3),
            f"{printable(name, 40)}, {lasted / 1e3:,.1f} ms",
        )
        for began, lasted, track, name in spans
        if track in tracks
    ]
    part = " from the middle of the trace" if len(spans) < len(events_by_time) else ""
    text = f"{whole / 1e6:.2f} seconds{part}, {count_of(len(bars), 'span')} in {count_of(len(tracks), 'row')}, one for each thread or process."
    return {
        "text": text,
        "classes": classes,
        "rows": [(row * ROW, names.get(track, str(track))[:14]) for row, track in enumerate(tracks)],
        "bars": bars,
        "ticks": [(LEFT + part * WIDTH, part * whole / 1e6) for part in (0.0, 0.25, 0.5, 0.75, 1.0)],
        "width": LEFT + WIDTH,
        "height": ROW * len(tracks) + 20,
    }


def run_page(
    values: Any, *, name: str = "run", disk: Mapping[str, Any] | None = None, trace: Any = None
) -> str:
    """Return the page of a run: stages with the limit marked, course, sweep, disk and timeline.

    ``values`` are the JSON values of stats (``stats.to_dict()``) or of ``prep bench-loader --json``, ``disk``
    those of a disk profile (``prep bench-disk --save``), and ``trace`` those of a loader's Chrome trace.
    ``name`` goes into the title. The page is one file without a script. Raises DataError for other values.
    """
    is_bench = isinstance(values, dict) and isinstance(values.get("stats"), dict)
    bench, stats = (values, values["stats"]) if is_bench else ({}, values)
    run = RunValues.of(stats)
    try:
        return page(
            "run",
            title=f"{name}: bottleneck",
            name=name,
            run=run,
            facts=bench_facts(bench, stats),
            charts=course_charts(run),
            sweep=sweep_part(bench.get("sweep")),
            disk=disk_part(bench, disk),
            timeline=None if trace is None else timeline(trace),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"these are not the values of a run: {type(error).__name__}: {error}") from error


def save_page(text: str, path: str | os.PathLike[str]) -> None:
    """Write a page, atomically replacing a file. Raises OperationError for a folder or a device, OSError."""
    save_bytes(user_path(path), text.encode())
