"""The text output of ``prep bench-loader``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardprep.cli.console.output import print_fields, say
from shardprep.formats.system.sizes import count_of, size

if TYPE_CHECKING:
    from shardprep.loaders import ShuffleQuality, StageLoad
    from shardprep.loaders.measuring.loader_bench import LoaderBench, Sweep
    from shardprep.loaders.measuring.loader_speed import LoaderSpeed
    from shardprep.loaders.measuring.probes import Probes

BAR = 40  # characters


def print_report(dataset: Path | str, found: LoaderBench, *, explain: bool) -> None:
    """Print the figures, the requested tables, and last the verdict in one sentence."""
    speed = found.speed
    if found.sweep:
        _print_lines(sweep_lines(found.sweep))
    rate = f"{speed.images_per_second:,.0f} images/s, {size(speed.bytes_per_second)}/s"
    say(f"{dataset}: {rate} (median of half seconds)")
    print_fields(_fields(speed))
    if explain and speed.verdict:
        _print_lines(("", *load_lines(speed.stats.loads)))
    if found.probes:
        _print_lines(("", *probe_lines(found.probes)))
    if found.shuffle_quality:
        _print_lines(("", *quality_lines(found.shuffle_quality)))
    say()
    if found.shuffle_quality:
        say(found.shuffle_quality.sentence)
    if found.disk:
        say(found.disk.sentence)
    say(found.sentence)


def _print_lines(lines: Sequence[str] | Iterator[str]) -> None:
    for line in lines:
        say(line)


def _fields(speed: LoaderSpeed) -> dict[str, object]:
    stages = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in speed.stages.items())
    fields: dict[str, object] = {
        "measured": f"{count_of(speed.images, 'image')} in {speed.seconds:.1f} s, {speed.images / speed.seconds:,.0f}/s",
        "first batch": f"after {speed.first_batch:.2f} s",
        "between batches": f"p50 {speed.gap_p50 * 1e3:,.1f} ms, p99 {speed.gap_p99 * 1e3:,.1f} ms",
        "worker, per image": stages,
        "workers waiting": f"{speed.idle:.1%} for work, {speed.blocked:.1%} for a free slot",
        "consumer waiting": f"{speed.starved:.1%} for a batch",
        "CPU, per image": f"{speed.cpu * 1e6:,.0f} µs, of which the main process {speed.main_cpu * 1e6:,.1f} µs",
        "memory": _memory(speed),
        "page cache": _page_cache(speed),
    }
    if _is_remote(speed):
        fields["storage"] = _storage(speed)
    if speed.restarts:
        fields["restarts"] = count_of(speed.restarts, "worker")
    if speed.skipped:
        fields["skipped"] = count_of(speed.skipped, "bad record")
    return fields


def _is_remote(speed: LoaderSpeed) -> bool:
    return bool(speed.stats.storage.downloaded or speed.stats.storage.hits)


def _storage(speed: LoaderSpeed) -> str:
    found = speed.stats.storage
    return (
        f"{count_of(found.downloaded, 'file')} downloaded, {size(found.downloaded_bytes)}; {found.hits:,} were in the "
        f"cache; batches waited {found.limiting:.2f} s"
    )


def _memory(speed: LoaderSpeed) -> str:
    memory = speed.memory
    parts = [
        ("batches", memory.ring),
        ("main process", memory.main_peak),
        ("worker's own", memory.worker_own),
    ]
    return ", ".join(f"{name} {size(count)}" for name, count in parts if count)


def _page_cache(speed: LoaderSpeed) -> str:
    before, after = speed.page_cache.before, speed.page_cache.after
    if before is None or after is None:
        return "the system does not say what it holds"
    return f"held {before:.0%} of the shards before, {after:.0%} after"


def load_lines(loads: Sequence[StageLoad]) -> Iterator[str]:
    """Yield the stages as a table, service times in microseconds per image."""
    yield f"  {'stage':14}{'where':8}{'µs/image':>10}{'busy':>8}{'starved':>9}{'blocked':>9}{'limit, images/s':>17}"
    for load in loads:
        limit = f"{load.limit:,.0f}" if math.isfinite(load.limit) else "-"
        yield (
            f"  {load.name:14}{load.place:8}{load.seconds * 1e6:>10,.1f}{load.utilisation:>8.1%}"
            f"{load.starved:>9.1%}{load.blocked:>9.1%}{limit:>17}"
        )


def probe_lines(probes: Probes) -> Iterator[str]:
    """Yield each probe's sentence, and whether it confirms the verdict."""
    labels = {True: "fits", False: "does not fit", None: ""}
    for run in probes.runs:
        yield f"  {run.name:12}{labels[run.confirms]:14}{run.sentence}"
    if probes.confirmed is not None:
        yes = "confirm" if probes.confirmed else "do not confirm"
        yield f"  The probes {yes} that {probes.limit} limits."


def quality_lines(found: ShuffleQuality) -> Iterator[str]:
    """Yield what was measured of the shuffle, beside a full one."""
    yield f"  {'shuffle':32}{'found':>12}{'full shuffle':>15}"
    yield f"  {'classes in a batch':32}{found.classes.found:>12,.1f}{found.classes.expected:>15,.1f}"
    yield f"  {'fewest classes in a batch':32}{found.fewest:>12,}"
    yield f"  {'standard deviations apart':32}{found.distance:>12,.1f}{0:>15.1f}"
    moved, third = found.displacement, found.records / 3
    yield f"  {'places moved, mean':32}{moved.mean:>12,.0f}{third:>15,.0f}"
    yield f"  {'places moved, 5 % and 95 %':32}{f'{moved.p5:,.0f} {moved.p95:,.0f}':>27}"
    if apart := found.stored_neighbours:
        yield f"  {'places between stored neighbours':32}{apart.found:>12,.0f}{apart.expected:>15,.0f}"
    again = found.meet_again
    yield f"  {'neighbours that meet again':32}{again.found:>12.3%}{again.expected:>15.3%}"


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    """Yield a line with a bar for each value."""
    option = sweep.option.replace("_", "-")
    most, mark = sweep.fastest.speed.images_per_second, _mark()
    yield f"{option:>10}{'images/s':>11}{'CPU µs':>9}{'p99 ms':>9}  limit"
    for value, speed in ((run.value, run.speed) for run in sweep.runs):
        limit = speed.verdict.limit if speed.verdict else "too short"
        bar = mark * max(1, round(BAR * speed.images_per_second / most))
        yield (
            f"{value:>10,}{speed.images_per_second:>11,.0f}{speed.cpu * 1e6:>9,.0f}{speed.gap_p99 * 1e3:>9,.1f}"
            f"  {limit:14}{bar}"
        )
    if any(run.speed.is_too_short for run in sweep.runs):
        yield "Too short to tell which is fastest: measure longer."
    else:
        yield f"Fastest with {option}={sweep.fastest.value}."
    yield ""


def _mark() -> str:
    return "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
