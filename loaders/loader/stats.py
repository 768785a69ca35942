"""Counts and times of a loader, and what limits it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from shardprep.loaders.engine.course import CoursePoint
from shardprep.loaders.engine.stats import EngineStats

from .bottleneck import PipelineTimes, StageLoad, Verdict, loads_to_list
from .shards_ahead.local_shards import StorageCounts
from .shown_stats import ShownStats


@dataclass(frozen=True, repr=False)
class LoaderStats(EngineStats, ShownStats):
    """Stats of a loader: those of its engine, and what they depend on.

    ``workers`` is the number of worker processes, ``cpus`` the number of CPUs that this process may use,
    ``image_bytes`` the mean size of an encoded image, ``crop_ready`` the share of the images that are
    crop-ready, 0..1, and ``storage`` what came from a remote dataset. ``course`` is how rows and queue were
    over the time, in at most 240 parts of equal length, since the loader's first batch; also in the stats of
    a part of the time.
    """

    kind: ClassVar[str] = "loader"

    workers: int
    cpus: int
    image_bytes: float
    crop_ready: float
    course: tuple[CoursePoint, ...] = ()
    storage: StorageCounts = field(default_factory=StorageCounts)

    def since(self, before: Self) -> Self:
        """Return what was counted after ``before``, earlier stats of the same loader."""
        return replace(super().since(before), storage=self.storage.since(before.storage))

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's service time, utilisation and waiting; the last stage is the consumer's own work."""
        return self._flowing().loads()

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limits; None before the second batch."""
        return self._flowing().verdict()

    def of_workers(self) -> Verdict | None:
        """Return what limits the workers, also where the consumer is slower."""
        return self._flowing().of_workers()

    def _flowing(self) -> PipelineTimes:
        return PipelineTimes(
            images=self.rows,
            timed=self.timed,
            elapsed=self.elapsed,
            image_bytes=self.image_bytes,
            crop_ready=self.crop_ready,
            workers=self.workers,
            cpus=self.cpus,
            filling=sum(self.filling),
            cpu=sum(self.cpu),
            queued=sum(self.queued),
            stages=self.stages,
            blocked=self.blocked,
            starved=self.starved,
            handing=self.handing,
            storage=self.storage.limiting,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the counts, ``loads`` and ``verdict``."""
        verdict = self.verdict
        return {
            **asdict(self),
            "loads": loads_to_list(self.loads),
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<{type(self).__name__}: {self.rows:,} images in {self.batches:,} batches{limit}>"

    def __str__(self) -> str:
        return str(self.verdict or "nothing is known before the second batch")
