"""``prep bench-disk`` and ``prep bench-loader``: how fast data reaches a training process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import CommandBar, CommandProgress, Output, fields, for_each_dataset
from shardprep.formats.runtime.json_record import read_json_file
from shardprep.formats.runtime.progress import count_of, format_size
from shardprep.formats.storage.open import datasets_in, open_records

if TYPE_CHECKING:
    from shardprep.loaders.measuring.bench import LoaderBench, LoaderSpeed, Sweep
    from shardprep.loaders.measuring.disk import DiskProfile, Measurement, Reads
    from shardprep.loaders.order.epoch import Shuffle


MINIMA = {"workers": 0, "batch-size": 1, "slots": 3}  # and their smallest values
BAR = 40  # characters
CONFIRMS = {True: "fits", False: "does not fit", None: ""}


@command(
    "Measure how fast a disk can feed training.",
    "bench-disk shards/train",
    "bench-disk shards/train --seconds 60 --save disk.json",
)
@click.argument("path", type=options.ANY_PATH)
@click.option("--seconds", type=click.FloatRange(min=0), default=20, help="Total time to measure.")
@options.count(
    "--record-bytes", "Size of a record.  [default: the dataset's mean, or 110000]", 1, most=16 << 20
)
@options.output
@options.file("--save", "PROFILE.json", "Also save the profile, to compare a loader with.")
def bench_disk(path: Path, progress: CommandProgress, save: Path | None, **chosen: Any) -> Output:
    """Measure how fast the disk of PATH reads and writes; PATH is a dataset, a file or any folder.

    It reads cold (with these files removed from the page cache) and warm: sequentially, at random places, and
    many small files. It needs no special permissions and leaves nothing behind.
    """
    from shardprep.loaders.measuring.disk import measure_disk  # start-up time

    options.check_output_files(save)
    with progress.status() as show:
        profile = measure_disk(
            path, progress=lambda title, share: show(f"{title}, {share:.0%} of the time"), **chosen
        )
    if save:
        profile.save(save)
    return Output(profile.to_json(), _profile_lines(profile))


def _profile_lines(profile: DiskProfile) -> Iterator[str]:
    from shardprep.loaders.measuring.disk import block_size  # start-up time

    what = "a file made for it" if profile.kind == "folder" else count_of(profile.files, "file")
    yield f"{profile.path}: {what}, {format_size(profile.bytes)}, on {profile.filesystem or 'an unknown system'}"
    methods = {
        "posix_fadvise": "pages dropped by posix_fadvise, checked by mincore",
        "O_DIRECT": "read with O_DIRECT",
    }
    missing = profile.missing
    yield from fields(
        {
            "cold": methods.get(profile.cold_method or "", f"could not be measured: {missing.cold}"),
            "records": f"{profile.record_bytes:,} bytes",
            "measured": f"{profile.seconds:.1f} s; MB/s, medians (quartiles) of passes in turns",
            "small files": f"not measured: {missing.small_files}" if missing.small_files else None,
            "writing": f"not measured: {missing.writing}" if missing.writing else None,
            **{f"note {number}": text for number, text in enumerate(profile.remarks, 1)},
        }
    )
    rows: list[tuple[str, Reads]] = [("loader's pattern", profile.stream)]
    rows += [(f"sequential, {block_size(reads.block_bytes)}", reads) for reads in profile.sequential]
    rows += [(f"random, {reads.queue_depth} at once", reads) for reads in profile.random]
    if small := profile.small_files:
        rows += [(f"{small.count} small files", small.files), ("the same in a shard", small.shard)]
    yield ""
    yield f"  {'':22}{'cold':>30}{'warm':>30}"
    for name, reads in rows:
        yield f"  {name:22}{_format_cell(reads.cold):>30}{_format_cell(reads.warm):>30}"
    yield f"  {'write and fsync':22}{_format_cell(profile.writing):>30}"
    yield ""
    yield disk_sentence(profile)


def _format_cell(reads: Measurement | None) -> str:
    if reads is None:
        return "-"
    low, median, high = (f"{rate / 1e6:,.0f}" for rate in (reads.low, reads.median, reads.high))
    return f"{median} ({low}-{high}) x{reads.repetitions}"


def disk_sentence(profile: DiskProfile) -> str:
    rates = [f"{rate:,.0f} images/s {word}" for word, rate in profile.images_per_second.items() if rate]
    compared, faster = "", profile.sequential_over_random
    if ratio := faster["cold"] or faster["warm"]:
        beats = f"beats random by {ratio:.1f}\N{MULTIPLICATION SIGN}"
        compared = f"; sequential reading {beats if ratio >= 1.05 else 'is no faster than random'}"
    size = format_size(profile.record_bytes).replace(".0 ", " ")
    return f"At {size} per record this disk delivers {' and '.join(rates) or 'an unknown rate'}{compared}."


def _parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    option, _, numbers = text.partition("=")
    words = numbers.split(",")
    if option not in MINIMA or not all(word.isdecimal() and int(word) >= MINIMA[option] for word in words):
        raise ValueError(
            f"expected workers from 0, batch-size from 1 or slots from 3, such as workers=1,2,4, not {text!r}"
        )
    return option.replace("-", "_"), tuple(map(int, words))


@command(
    "Measure how fast datasets load, and what limits them.",
    "bench-loader shards/train",
    "bench-loader shards/train --explain --sweep workers=1,2,4",
    "bench-loader s3://bucket/train --cache /nvme/cache --cache-limit 200GiB",
)
@click.argument("dataset", type=options.FOLDER_OR_URL)
@options.combine_options(*options.LOADER)
@click.option("--seconds", type=click.FloatRange(min=0), default=10, help="How long to measure.")
@options.workers
@options.flag("--explain", "Also print a table of stages, and test the verdict with short runs.")
@options.value(
    "--sweep",
    "OPTION=N,N",
    "Measure with each of these values of workers, batch-size or slots; the rest of the output is about "
    "the fastest.",
    name="swept",
    type=options.ParsedParam("sweep", _parse_sweep),
)
@options.file("--trace", "FILE.json", "Also write a Chrome trace, for ui.perfetto.dev.")
@options.file("--html", "FILE", "Also write a page with charts of the run.")
@options.file("--disk", "PROFILE.json", "Compare with a disk profile from prep bench-disk --save.")
@options.value(
    "--columns",
    "NAME,NAME",
    "Read only these columns; without 'image', and for records without images, --transform is none.  "
    "[default: all]",
)
@options.flag(
    "--shuffle-quality",
    "Also report how well batches are mixed compared with a full shuffle, computed from the order alone.",
    name="mixing",
)
@options.cache
@options.output
def bench_loader(
    dataset: Path | str,
    transform: str,
    pixels: int,
    batch_size: int,
    shuffle: Shuffle | None,
    workers: int | None,
    explain: bool,
    trace: Path | None,
    html: Path | None,
    disk: Path | None,
    columns: str | None,
    progress: CommandProgress,
    cache: Path | None,
    cache_limit: int | None,
    **chosen: Any,
) -> Output:
    """Load DATASET, or each split in that folder, for a while, and report how fast and what limits it.

    The first epoch reads the disk; later ones, and data that fit in memory, show the speed of decoding.
    """
    from shardprep.loaders.loader.loader import Loader  # start-up time: OpenCV
    from shardprep.loaders.measuring.bench import bench
    from shardprep.loaders.measuring.disk import DiskProfile

    splits = datasets_in(dataset)
    cached: dict[str, Any] = {"cache": cache, "cache_limit": cache_limit}
    options.check_output_files(html, trace)
    for file, option in ((trace, "--trace"), (html, "--html")):
        if file and splits:
            raise click.UsageError(f"{dataset} is a folder of splits; {option} needs one of them")
    profile = DiskProfile.load(disk) if disk else None
    names = columns.split(",") if columns else None
    has_images = not names or "image" in names
    for place in () if names else splits.values() or [dataset]:
        with open_records(place, **cached) as opened:
            has_images &= all(part.manifest.has_images for part in opened.parts)
    crop = options.make_transform(transform, pixels) if has_images else None

    def measure_one(place: Path | str) -> Output:
        make = partial(
            Loader,
            place,
            batch_size=batch_size,
            transform=crop,
            shuffle=shuffle,
            workers="auto" if workers is None else workers,
            rank=0,
            world_size=1,
            drop_last=False,
            columns=names,
            **cached,
        )
        watched = isinstance(progress, CommandBar)
        result = bench(
            make, transform=crop, explain=explain, trace=trace, watched=watched, disk=profile, **chosen
        )
        if html:
            from shardprep.loaders.engine.trace import LARGEST_TRACE
            from shardprep.loaders.loader.run_page import run_page, save_page  # start-up time

            disk_json = profile.to_json() if profile else None
            spans = read_json_file(trace, most=LARGEST_TRACE) if trace else None
            save_page(run_page(result.to_json(), name=str(place), disk=disk_json, trace=spans), html)
        lines = _bench_lines(place, result, explain=explain)
        return Output({"dataset": str(place), **result.to_json()}, lines, result=result.speed)

    def summary(results: Mapping[str, LoaderSpeed]) -> str:
        return ", ".join(f"{name} {speed.images_per_second:,.0f} images/s" for name, speed in results.items())

    return for_each_dataset(dataset, measure_one, summary)


def _bench_lines(dataset: Path | str, result: LoaderBench, *, explain: bool) -> Iterator[str]:
    speed, quality = result.speed, result.shuffle_quality
    if result.sweep:
        yield from sweep_lines(result.sweep)
    rate = f"{speed.images_per_second:,.0f} images/s, {format_size(speed.bytes_per_second)}/s"
    yield f"{dataset}: {rate} (median of half seconds)"
    memory = {
        "batches": speed.memory.ring,
        "main process": speed.memory.main_peak,
        "worker's own": speed.memory.worker_own,
    }
    before, after = speed.page_cache.before, speed.page_cache.after
    pages = "the system does not report what is cached"
    if before is not None and after is not None:
        pages = f"held {before:.0%} of the shards before, {after:.0%} after"
    storage = speed.stats.storage
    downloaded = f"{count_of(storage.downloaded, 'file')} downloaded, {format_size(storage.downloaded_bytes)}"
    yield from fields(
        {
            "measured": f"{count_of(speed.images, 'image')} in {speed.seconds:.1f} s, {speed.images / speed.seconds:,.0f}/s",
            "first batch": f"after {speed.first_batch:.2f} s",
            "between batches": f"p50 {speed.gap_p50 * 1e3:,.1f} ms, p99 {speed.gap_p99 * 1e3:,.1f} ms",
            "decoder": speed.decoder,
            "worker, per image": ", ".join(
                f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in speed.stages.items()
            ),
            "workers waiting": f"{speed.idle:.1%} for work, {speed.blocked:.1%} for a free slot",
            "consumer waiting": f"{speed.starved:.1%} for a batch",
            "CPU, per image": f"{speed.cpu * 1e6:,.0f} µs, {speed.main_cpu * 1e6:,.1f} µs of it in the main process",
            "memory": ", ".join(f"{name} {format_size(count)}" for name, count in memory.items() if count),
            "page cache": pages,
            "storage": f"{downloaded}; {storage.hits:,} were in the cache; batches waited {storage.limiting:.2f} s"
            if storage.downloaded or storage.hits
            else None,
            "restarts": count_of(speed.restarts, "worker") if speed.restarts else None,
            "skipped": count_of(speed.skipped, "bad record") if speed.skipped else None,
        }
    )
    if explain and speed.verdict:
        yield ""
        yield f"  {'stage':14}{'where':8}{'µs/image':>10}{'busy':>8}{'starved':>9}{'blocked':>9}{'limit, images/s':>17}"
        for load in speed.stats.loads:
            limit = f"{load.limit:,.0f}" if math.isfinite(load.limit) else "-"
            yield (
                f"  {load.name:14}{load.place:8}{load.seconds * 1e6:>10,.1f}{load.utilisation:>8.1%}"
                f"{load.starved:>9.1%}{load.blocked:>9.1%}{limit:>17}"
            )
    if result.probes:
        yield ""
        for run in result.probes.runs:
            yield f"  {run.name:12}{CONFIRMS[run.confirms]:14}{run.sentence}"
        if result.probes.confirmed is not None:
            yes = "confirm" if result.probes.confirmed else "do not confirm"
            yield f"  The probes {yes} that {result.probes.limit} limits."
    if quality:
        moved, again = quality.displacement, quality.meet_again
        yield ""
        yield f"  {'shuffle':32}{'found':>12}{'full shuffle':>15}"
        yield f"  {'classes in a batch':32}{quality.classes.found:>12,.1f}{quality.classes.expected:>15,.1f}"
        yield f"  {'fewest classes in a batch':32}{quality.fewest:>12,}"
        yield f"  {'standard deviations apart':32}{quality.distance:>12,.1f}{0:>15.1f}"
        yield f"  {'places moved, mean':32}{moved.mean:>12,.0f}{quality.records / 3:>15,.0f}"
        yield f"  {'places moved, 5% and 95%':32}{f'{moved.p5:,.0f} {moved.p95:,.0f}':>27}"
        if apart := quality.stored_neighbours:
            yield f"  {'places between stored neighbours':32}{apart.found:>12,.0f}{apart.expected:>15,.0f}"
        yield f"  {'neighbours that meet again':32}{again.found:>12.3%}{again.expected:>15.3%}"
    yield ""
    if quality:
        yield quality.sentence
    if result.disk:
        yield result.disk.sentence
    yield speed.sentence


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    option, (value, fastest) = sweep.option.replace("_", "-"), sweep.fastest
    mark = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    yield f"{option:>10}{'images/s':>11}{'CPU µs':>9}{'p99 ms':>9}  limit"
    for each, speed in sweep.runs:
        bar = mark * max(1, round(BAR * speed.images_per_second / fastest.images_per_second))
        yield (
            f"{each:>10,}{speed.images_per_second:>11,.0f}{speed.cpu * 1e6:>9,.0f}{speed.gap_p99 * 1e3:>9,.1f}"
            f"  {speed.limit or 'too short':14}{bar}"
        )
    if any(speed.is_too_short for _, speed in sweep.runs):
        yield "The runs are too short to tell which is fastest; measure longer."
    else:
        yield f"Fastest with {option}={value}."
    yield ""
