"""The parts of a page that are of a benchmark: figures, the sweep and the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardprep.formats.pages.charts import bars
from shardprep.formats.pages.line_chart import line_chart
from shardprep.formats.pages.shown_text import shown_share
from shardprep.formats.system.sizes import size

from .run_values import list_in, number_in, text_in

ENOUGH = 0.95  # of the greatest rate of a sweep; the smallest value that reaches it is its knee
MOST_RUNS = 100

Part = dict[str, Any]


def bench_facts(bench: Mapping[str, Any], stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of what was measured beside the stages."""
    facts = []
    if "first_batch" in bench:
        facts.append(("first batch", f"after {number_in(bench['first_batch']):.2f} s"))
    elif "warming" in stats:
        facts.append(("first batch", f"waited for {number_in(stats['warming']):.2f} s"))
    if "gap_p50" in bench:
        p50, p99 = (1e3 * number_in(bench[name]) for name in ("gap_p50", "gap_p99"))
        facts.append(("between batches", f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"))
    if "bytes_per_second" in bench:
        facts.append(("encoded images", f"{size(number_in(bench['bytes_per_second']))}/s"))
    if "workers" in stats:
        cpus = number_in(stats["cpus"])
        facts.append(("workers", f"{number_in(stats['workers']):.0f} on {cpus:.0f} CPUs"))
    if stats.get("restarts"):
        facts.append(("workers replaced", f"{number_in(stats['restarts']):.0f}"))
    return facts


def sweep_part(sweep: Mapping[str, Any] | None) -> Part | None:
    """Return the plot of a sweep with its knee marked, and a sentence; None without one."""
    if not sweep:
        return None
    runs = sorted(
        (number_in(run["value"]), number_in(run["images_per_second"]))
        for run in list_in(sweep["runs"])[:MOST_RUNS]
    )
    option, most = text_in(sweep["option"]).replace("_", " "), max(rate for _, rate in runs)
    knee, rate = next(run for run in runs if run[1] >= ENOUGH * most)
    text = f"{option} {knee:,.0f} reaches {rate:,.0f} images/s"
    less = f", {shown_share(rate / most)} of the most" if rate < most else ", the most"
    chart = line_chart(
        runs, title=f"Rate by {option}", x=option, y="images/s", dotted=True, mark=(knee, "enough")
    )
    return {"text": f"{text}{less}; a greater number adds little or nothing.", "chart": chart}


def disk_part(bench: Mapping[str, Any], disk: Mapping[str, Any] | None) -> Part | None:
    """Return bars of what the loader takes and what the disk reads, and the sentence of the comparison."""
    rows = []
    if "bytes_per_second" in bench:
        rows.append(("this run, as delivered", number_in(bench["bytes_per_second"])))
    if disk:
        patterns = {"the loader's pattern": disk["stream"], **_by_depth(disk)}
        rows += [
            (f"{name}, {kind}", number_in(reads[kind]["median"]))
            for name, reads in patterns.items()
            for kind in ("cold", "warm")
            if reads[kind]
        ]
    against = bench.get("disk") or {}
    if not disk and against:
        rows += [
            (f"the disk, {kind}", number_in(against[kind])) for kind in ("cold", "warm") if against[kind]
        ]
    if len(rows) < 2:
        return None
    chart = bars(rows, title="Encoded images that are read", axis="bytes per second", show=_rate)
    return {"text": text_in(against["sentence"]) if against else "", "chart": chart}


def _by_depth(disk: Mapping[str, Any]) -> dict[str, Any]:
    found = list_in(disk["random"])
    return {
        f"random, {number_in(reads['queue_depth']):.0f} at once": reads
        for reads in (found[:1] + found[1:][-1:])
    }


def _rate(value: float) -> str:
    return f"{size(value)}/s"
