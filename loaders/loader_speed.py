"""How fast a loader was: rates, what it cost, and what limited it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .loader_stats import LoaderStats
from .process_memory import MemoryUse
from .verdict import Verdict


@dataclass(frozen=True)
class CacheShares:
    """The shares of the shards' pages that were in memory; None where the system does not say."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class LoaderSpeed:
    """Rates are medians over windows of half a second or more; ``bytes_per_second`` is of encoded images.

    ``first_batch`` is seconds from the loader's construction. ``gap_p50`` and ``gap_p99`` are seconds
    between batches. ``stages`` are a worker's seconds per image; the shares are of the time measured:
    workers without work, workers without a free slot, and a consumer without a batch (a loader that is the
    bottleneck keeps it waiting all the time). ``cpu`` is CPU seconds per image of all processes, of which
    ``main_cpu`` is the consumer's. ``stats`` is the loader's account of the time measured.
    """

    images: int
    batches: int
    seconds: float
    first_batch: float
    images_per_second: float
    bytes_per_second: float
    gap_p50: float
    gap_p99: float
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
        """What limited; None where that cannot be told."""
        return self.stats.verdict

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types; docs/bench-loader.md lists the keys."""
        names = [f.name for f in fields(self)]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        parts = {name: asdict(values[name]) for name in ("memory", "page_cache")}
        return {**values, **parts, "stats": self.stats.to_dict()}
