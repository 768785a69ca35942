"""The benchmark of a loader: its speed, the sweep of an option, and probes that test the verdict."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.images.decode import decoder_name
from shardprep.formats.runtime.processes import lines_of
from shardprep.formats.runtime.progress import check_seconds
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import Clock, Fill
from shardprep.loaders.loader.loader import DEFAULT_SLOTS, Loader
from shardprep.loaders.loader.stats import HAND_OVER, Arrivals, LoaderStats, Verdict
from shardprep.loaders.loader.work import TRANSFORM_STAGES, blocks_to_read, item_dtype
from shardprep.loaders.measuring.disk import DiskProfile, resident_share
from shardprep.loaders.measuring.progress_bar import LoaderBar, tracing
from shardprep.loaders.order.quality import ShuffleQuality
from shardprep.loaders.transforms.contract import Transform

MIN_FULL_BATCHES = 5  # batches that only partly lie in a shorter run would distort its figures
MAX_CHECKED_SHARDS = 64  # for the page cache: checking takes 5 ms per GB
DISK_BOUND_SHARE = 0.7  # of the disk's rate: a loader that reads at this rate or faster is disk-bound

PROBE_SHARE = 0.25  # the time of a probe as a share of the measurement's
FASTER = 1.25  # the least ratio of rates that counts as faster
EXPECTED_FASTER, EXPECTED_EQUAL = 1.5, 1.1  # a probe says nothing about an expected ratio between these
IN_MEMORY = 0.9  # with at least this share of the shards in the page cache, storage is not read
TRANSPORT_STAGES = ("transport", HAND_OVER)


LoaderFactory = Callable[..., Loader]
"""A factory of loaders that takes options, such as ``functools.partial(Loader, path, …)``."""


def bench(
    make: LoaderFactory,
    transform: Transform | None,
    *,
    seconds: float,
    swept: tuple[str, Sequence[int]] | None = None,
    explain: bool = False,
    trace: str | os.PathLike[str] | None = None,
    disk: DiskProfile | None = None,
    watched: bool = True,
    mixing: bool = False,
) -> LoaderBench:
    """Measure the loader that ``make`` makes for ``seconds``, or once for each value of the ``swept`` option.

    ``explain`` adds probes of a quarter of that time each, if the run was long enough for a verdict.
    ``trace`` names a file for a Chrome trace, after a sweep that of one more run with the fastest value.
    ``watched`` shows a bar on a terminal or in a notebook. ``mixing`` adds the quality of the shuffle. Raises
    the loader's errors, and OSError.
    """
    sweep = probes = comparison = quality = None
    if swept:
        option, values = swept
        runs = [(n, measure(partial(make, **{option: n}), seconds=seconds, watched=watched)) for n in values]
        sweep = Sweep(option, tuple(runs))
        fastest, speed = sweep.fastest
        make = partial(make, **{option: fastest})
    if not sweep or trace:
        speed = measure(make, seconds=seconds, trace=trace, watched=watched)
    if explain and speed.verdict:
        probes = probe(make, speed, transform, seconds=seconds * PROBE_SHARE)
    if disk:
        rates = disk.stream.rate("cold"), disk.stream.rate("warm")
        comparison = DiskComparison(speed.bytes_per_second, *rates, speed.limit)
    if mixing:
        with make(workers=0) as loader:
            quality = loader.shuffle_quality()
    return LoaderBench(speed, sweep, probes, comparison, quality)


@dataclass(frozen=True)
class LoaderBench:
    """The speed of a loader and its additions, None for those that were not asked for."""

    speed: LoaderSpeed
    sweep: Sweep | None
    probes: Probes | None
    disk: DiskComparison | None
    shuffle_quality: ShuffleQuality | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types; docs/reference/bench-loader.md lists the keys."""
        parts = {name: part for name, part in vars(self).items() if name != "speed"}
        return self.speed.to_json() | {name: part.to_json() if part else None for name, part in parts.items()}


@dataclass(frozen=True)
class Sweep:
    """The values of ``option``, a parameter of the loader, in the given order, and the speed with each."""

    option: str
    runs: tuple[tuple[int, LoaderSpeed], ...]

    @property
    def fastest(self) -> tuple[int, LoaderSpeed]:
        return max(self.runs, key=lambda run: run[1].images_per_second)

    def to_json(self) -> dict[str, Any]:
        names = ("images_per_second", "bytes_per_second", "gap_p50", "gap_p99", "cpu", "starved")
        runs = []
        for value, speed in self.runs:
            verdict = speed.verdict.to_dict() if speed.verdict else None
            figures = {name: getattr(speed, name) for name in names}
            runs.append({"value": value, **figures, "verdict": verdict})
        return {"option": self.option, "fastest": self.fastest[0], "runs": runs}


def measure(
    make: Callable[[], Loader],
    *,
    seconds: float,
    trace: str | os.PathLike[str] | None = None,
    watched: bool = False,
) -> LoaderSpeed:
    """Measure a new loader for ``seconds`` after its first batch, over as many epochs as fit, and close it.

    At least one batch is measured after the first; a verdict needs five full ones.

    Args:
        make: Makes the loader.
        seconds: Time to measure.
        trace: File for a Chrome trace; None writes none.
        watched: Whether to show a bar on a terminal or in a notebook.

    Returns:
        The rates, the times of the stages, and the verdict.

    Raises:
        UsageError: ``seconds`` is not a number of 0 or more.
        OSError: The trace cannot be written. Errors of the loader are raised unchanged.
    """
    seconds = check_seconds(seconds, "the time to measure")
    existing, began = {*multiprocessing.active_children()}, time.perf_counter()
    with make() as loader:
        cached = _cached_share(loader)
        with ExitStack() as stack:
            recording = stack.enter_context(tracing(loader)) if trace else None
            bar = stack.enter_context(LoaderBar(loader, shown=watched))
            batches = bar.over(stack.enter_context(closing(_repeat_epochs(loader))))
            arrivals = Arrivals(batches, lambda batch: len(batch[-1]))  # labels are last
            arrivals.draw()
            before, cpu_before = loader.stats(), time.process_time()
            arrivals.draw_for(seconds)
            after, main_cpu = loader.stats(), time.process_time() - cpu_before
        if recording and trace:
            recording.save(trace)
        images, elapsed, rate = arrivals.amount, arrivals.seconds, arrivals.rate
        stats = after.since(before)
        # This consumer has no training step: all time without waiting is spent on handing over.
        handing = max(stats.handing, elapsed - stats.starved - stats.storage.limiting)
        stats = replace(stats, elapsed=elapsed, handing=handing)
        gap_p50, gap_p99 = arrivals.gaps
        workers = [_process_sizes(child.pid) for child in {*multiprocessing.active_children()} - existing]
        return LoaderSpeed(
            images=images,
            batches=arrivals.count,
            batch_size=loader.engine.layout.rows,
            seconds=elapsed,
            first_batch=arrivals.first - began,
            images_per_second=rate,
            bytes_per_second=rate * stats.image_bytes,
            gap_p50=gap_p50,
            gap_p99=gap_p99,
            decoder=decoder_name() if loader.transform else None,
            stages={name: spent / images for name, spent in stats.stages.items()},
            idle=sum(stats.waiting) / len(stats.waiting) / elapsed,
            blocked=stats.blocked / elapsed,
            starved=stats.starved / elapsed,
            cpu=(main_cpu + (sum(stats.cpu) if stats.workers else 0.0)) / images,
            main_cpu=main_cpu / images,
            skipped=len(loader.skipped),
            restarts=after.restarts,
            memory=MemoryUse(
                ring=loader.engine.shared_bytes,
                main_peak=_process_sizes(os.getpid()).get("VmHWM"),
                worker_peak=max((s["VmHWM"] for s in workers if "VmHWM" in s), default=None),
                worker_own=max((s["RssAnon"] for s in workers if "RssAnon" in s), default=None),
            ),
            page_cache=CacheShares(cached, _cached_share(loader)),
            stats=stats,
        )


def _repeat_epochs(loader: Loader) -> Generator[tuple[Any, ...], None, None]:
    while True:
        yield from loader


def _cached_share(loader: Loader) -> float | None:
    """Return the share in the page cache of the shards that are read; of many, an even sample is checked."""
    blocks = blocks_to_read(loader.dataset, loader._work.parts, with_image=loader._work.with_image)
    names = [*dict.fromkeys(loader.dataset.path / block.name for block in itertools.chain(*blocks))]
    count = min(len(names), MAX_CHECKED_SHARDS)
    sample = [names[number * len(names) // count] for number in range(count)]
    try:
        shares = [resident_share(path) for path in sample]
        sizes = [path.stat().st_size for path in sample]
    except OSError:
        return None
    return float(np.average(shares, weights=sizes)) if sum(sizes) else None


def _process_sizes(pid: int | None) -> dict[str, int]:
    """Return the sizes in /proc/PID/status in bytes, by name; empty without /proc or the process."""
    values = [line.split() for line in lines_of(Path(f"/proc/{pid}/status")) if line.endswith(" kB")]
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in values}


@dataclass(frozen=True)
class LoaderSpeed:
    """The measured speed of a loader.

    Rates are medians over windows of half a second or more; ``bytes_per_second`` counts encoded images and
    columns of varying size.
    ``first_batch`` is seconds from the loader's construction. ``gap_p50`` and ``gap_p99`` are seconds between
    batches. ``decoder`` is the name and version of this machine's JPEG decoder, None without a transform.
    ``stages`` are a worker's seconds per image. ``idle``, ``blocked`` and ``starved`` are shares of the time:
    workers without work, workers without a free slot, and the consumer without a batch (nearly 1 if the
    loader is the bottleneck). ``cpu`` is CPU seconds per image of all processes, ``main_cpu`` of the
    consumer's alone. ``stats`` are the loader's for the measured time.
    """

    images: int
    batches: int
    batch_size: int
    seconds: float
    first_batch: float
    images_per_second: float
    bytes_per_second: float
    gap_p50: float
    gap_p99: float
    decoder: str | None
    stages: dict[str, float]
    idle: float
    blocked: float
    starved: float
    cpu: float
    main_cpu: float
    skipped: int
    restarts: int
    memory: MemoryUse
    page_cache: CacheShares
    stats: LoaderStats

    @property
    def verdict(self) -> Verdict | None:
        """The limiting stage; None if it is unknown, as it is after too short a run."""
        return None if self.is_too_short else self.stats.verdict

    @property
    def limit(self) -> str:
        return self.verdict.limit if self.verdict else ""

    @property
    def is_too_short(self) -> bool:
        """Whether fewer images were measured than five full batches have."""
        return self.images < MIN_FULL_BATCHES * self.batch_size

    @property
    def sentence(self) -> str:
        """The verdict, or that the run was too short for one, as a sentence."""
        if not self.is_too_short:
            return str(self.stats)
        return (
            f"The run is too short to tell what limits it: {self.images:,} images in {self.seconds:.1f} s "
            f"are fewer than {MIN_FULL_BATCHES} batches of {self.batch_size:,}; measure longer, or make "
            "batches smaller."
        )

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types; docs/reference/bench-loader.md lists the keys."""
        parts = {"memory": asdict(self.memory), "page_cache": asdict(self.page_cache)}
        verdict = self.verdict.to_dict() if self.verdict else None
        return {**vars(self), **parts, "stats": {**self.stats.to_dict(), "verdict": verdict}}


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes. ``ring`` is the memory of the slots, shared by all processes; 0 without workers.

    ``main_peak`` and ``worker_peak`` (the largest worker's) are peak resident sizes, the ring included;
    ``worker_own`` is the largest private memory of a worker at the end. None if unknown, or without workers.
    """

    ring: int
    main_peak: int | None
    worker_peak: int | None
    worker_own: int | None


@dataclass(frozen=True)
class CacheShares:
    """The shares of the shards' pages in memory before and after; None if the system reports none."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class DiskComparison:
    """Bytes per second that the loader ``delivered``, and that the disk reads in its pattern, if measured.

    ``limit`` is the loader's limiting stage, "" if unknown.
    """

    delivered: float
    cold: float | None
    warm: float | None
    limit: str

    @property
    def sentence(self) -> str:
        delivered = f"{self.delivered / 1e6:,.0f} MB/s"
        if self.cold is None:
            return f"The loader delivers {delivered}; the rate of cold reads from this disk is unknown."
        reads = f"this disk reads {self.cold / 1e6:,.0f} MB/s cold"
        if not self.limit:
            return f"The loader delivers {delivered}; its bottleneck is unknown; {reads}."
        if self.limit != "read":
            enough = "which is enough" if self.cold > self.delivered else "which would limit a cold epoch"
            return f"Not disk-bound: the loader delivers {delivered}; {reads}, {enough}."
        if self.delivered < DISK_BOUND_SHARE * self.cold:
            return f"Reading limits at {delivered}, but {reads}: other programs use it, or more workers would help."
        return f"Disk-bound at {delivered}; {reads}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sentence": self.sentence}


@dataclass(frozen=True)
class Probe:
    """The result of a probe, and whether it ``confirms`` the verdict; None if it says nothing about it.

    ``name`` is "encoded" (nothing is decoded), "again" (the same again, from the page cache), "one core"
    (the transform of a single worker) or "hand-over" (nothing is read or written).
    """

    name: str
    images_per_second: float
    sentence: str
    confirms: bool | None


@dataclass(frozen=True)
class Probes:
    """All probes, and the limiting stage of the verdict."""

    limit: str
    runs: tuple[Probe, ...]

    @property
    def confirmed(self) -> bool | None:
        """Whether all probes of the limiting stage confirm it; None without any."""
        results = [run.confirms for run in self.runs if run.confirms is not None]
        return all(results) if results else None

    def to_json(self) -> dict[str, Any]:
        return {"limit": self.limit, "confirmed": self.confirmed, "runs": list(map(asdict, self.runs))}


def probe(make: LoaderFactory, speed: LoaderSpeed, transform: Transform | None, *, seconds: float) -> Probes:
    """Test the verdict of ``speed`` in a few runs of ``seconds`` each."""
    runs = [probe_hand_over(make, speed, seconds=seconds)]
    if transform is None:
        again = measure(make, seconds=seconds)
        return Probes(speed.limit, (*runs, _mark_if_inconclusive(judge_repetition(speed, again), again)))
    first, second = (measure(partial(make, transform=None), seconds=seconds) for _ in range(2))
    alone = measure(partial(make, workers=1), seconds=seconds)
    rate = 1 / max(sum(alone.stages[name] for name in TRANSFORM_STAGES), 1e-12)
    runs.append(_mark_if_inconclusive(judge_encoded(speed, first.images_per_second), first))
    runs.append(_mark_if_inconclusive(judge_repetition(first, second), first, second))
    runs.append(_mark_if_inconclusive(judge_one_core(speed, rate), alone))
    return Probes(speed.limit, tuple(runs))


def _mark_if_inconclusive(run: Probe, *speeds: LoaderSpeed) -> Probe:
    """Return the probe, without a conclusion if one of its runs was too short."""
    if not any(speed.is_too_short for speed in speeds):
        return run
    return replace(run, sentence="the run is too short to tell: measure longer", confirms=None)


@dataclass(frozen=True)
class NullWork:
    item_dtype: np.dtype[Any]
    stages: tuple[str, ...] = ()

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        yield lambda items, arrays, room: itertools.repeat(None, len(items))


def probe_hand_over(make: LoaderFactory, speed: LoaderSpeed, *, seconds: float) -> Probe:
    """Judge the rate of full batches of the loader's layout that are delivered without any work."""
    with make(workers=0) as loader:
        layout = loader.engine.layout
    items = np.zeros(layout.rows, item_dtype(32))
    with Engine(NullWork(items.dtype), layout, workers=speed.stats.workers, slots=DEFAULT_SLOTS) as engine:
        batches = engine.run(itertools.repeat(items))
        with closing(batches):  # type: ignore[type-var]
            arrivals = Arrivals(batches, lambda batch: len(batch.items))
            arrivals.draw()
            arrivals.draw_for(seconds)
    rate = arrivals.amount / arrivals.seconds
    faster = rate > FASTER * speed.images_per_second  # expected, unless the transport limits
    limits = "is not" if faster else "is"
    sentence = f"passing on empty batches reaches {rate:,.0f} images/s, so hand-over {limits} the bottleneck"
    return Probe("hand-over", rate, sentence, faster != (speed.limit in TRANSPORT_STAGES))


def judge_encoded(speed: LoaderSpeed, rate: float) -> Probe:
    """Judge the rate without decoding: it rises by the transform's share, unless the hand-over limits."""
    loads = {load.name: load.seconds for load in speed.stats.loads if load.place == "worker"}
    rest = sum(seconds for name, seconds in loads.items() if name not in TRANSFORM_STAGES)
    expected = sum(loads.values()) / max(rest, 1e-12)
    times = rate / speed.images_per_second
    limits = "is" if times > FASTER else "is not"
    confirms = None
    if speed.limit != HAND_OVER and not EXPECTED_EQUAL < expected < EXPECTED_FASTER:
        confirms = (times > FASTER) == (expected > FASTER)
    sentence = f"encoded bytes: {rate:,.0f} images/s, {times:.1f}x as many: decoding {limits} the bottleneck"
    return Probe("encoded", rate, sentence, confirms)


def judge_repetition(first: LoaderSpeed, second: LoaderSpeed) -> Probe:
    """Judge a repetition: it is faster if reading limits and only it found the shards in the page cache."""
    cached_before, cached, rate = first.page_cache.before, second.page_cache.before, second.images_per_second
    if cached is None or cached < IN_MEMORY:
        reason = "which says nothing about the storage, because not all shards are in memory"
    elif cached_before is not None and cached_before > IN_MEMORY:
        reason = "from memory as before: the storage was not read"
    elif rate > FASTER * first.images_per_second:
        reason = "from memory, so the storage is slower"
    else:
        reason = "from memory, so the storage is fast"
    return Probe("again", rate, f"encoded bytes again: {rate:,.0f} images/s, {reason}", None)


def judge_one_core(speed: LoaderSpeed, rate: float) -> Probe:
    """Judge one core's rate: all cores come near their multiple of it only if the workers do not wait."""
    stats = speed.stats
    cores = max(1, min(stats.workers, stats.cpus))
    share = speed.images_per_second / (cores * rate)
    confirms = None
    if speed.limit in TRANSFORM_STAGES:
        confirms = share > 1 / 3
    elif speed.limit == "read":
        confirms = share < 0.8
    sentence = (
        f"one core transforms {rate:,.0f} images/s, so {cores} could make "
        f"{cores * rate:,.0f}; the loader reaches {share:.0%} of that"
    )
    return Probe("one core", rate, sentence, confirms)
