"""Made-up speeds of loaders."""

from __future__ import annotations

from shardprep.loaders import LoaderStats
from shardprep.loaders.measuring.bench import CacheShares, LoaderSpeed, MemoryUse

DECODING = {"read": 1.0, "decode": 16.0, "augment": 2.0}
READING = {"read": 18.0, "decode": 1.0, "augment": 0.5}


def speed_of(stages: dict[str, float], *, cached: float | None = 1.0) -> LoaderSpeed:
    """The speed of 1,000 images of 100 KB in ten seconds, by two workers always busy with ``stages``."""
    stats = LoaderStats(
        rows=1000,
        timed=1000,
        batches=100,
        elapsed=10.0,
        starved=9.8,
        handing=0.1,
        filling=(10.0, 10.0),
        waiting=(0.0, 0.0),
        cpu=(9.5, 9.5),
        queued=(0.0, 0.0),
        stages=stages,
        workers=2,
        cpus=2,
        image_bytes=1e5,
        **dict.fromkeys(["warming", "blocked", "copied", "restarts", "crop_ready"], 0),
    )
    return LoaderSpeed(
        images=1000,
        batches=100,
        batch_size=10,
        seconds=10.0,
        first_batch=0.5,
        images_per_second=100.0,
        bytes_per_second=1e7,
        gap_p50=0.1,
        gap_p99=0.2,
        decoder=None,
        stages={name: seconds / 1000 for name, seconds in stages.items()},
        starved=0.98,
        cpu=0.02,
        main_cpu=0.0001,
        memory=MemoryUse(ring=0, main_peak=None, worker_peak=None, worker_own=None),
        page_cache=CacheShares(cached, cached),
        stats=stats,
        **dict.fromkeys(["idle", "blocked", "skipped", "restarts"], 0),
    )
