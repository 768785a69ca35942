"""Where a loader's time went, and what limits it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .timings import EngineStats
from .verdict import Flowing, StageLoad, Verdict, loads_to_list


@dataclass(frozen=True)
class LoaderStats(EngineStats):
    """An engine's stats, of images of ``image_bytes`` on average, where this process may use ``cpus`` CPUs."""

    workers: int
    cpus: int
    image_bytes: float

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's service time, utilisation and waiting; the consumer's own work is the last of them."""
        return self._flowing().loads()

    @property
    def verdict(self) -> Verdict | None:
        """What limits; None before the second batch."""
        return self._flowing().verdict()

    def of_workers(self) -> Verdict | None:
        """What limits the workers, whoever waits for whom."""
        return self._flowing().of_workers()

    def _flowing(self) -> Flowing:
        return Flowing(
            images=self.rows,
            timed=self.timed,
            elapsed=self.elapsed,
            image_bytes=self.image_bytes,
            workers=self.workers,
            cpus=self.cpus,
            filling=sum(self.filling),
            cpu=sum(self.cpu),
            queued=sum(self.queued),
            stages=self.stages,
            blocked=self.blocked,
            starved=self.starved,
            handing=self.handing,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the counts, ``loads`` and ``verdict``."""
        verdict = self.verdict
        return {
            **asdict(self),
            "loads": loads_to_list(self.loads),
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __str__(self) -> str:
        return str(self.verdict or "nothing can be told before an epoch's second batch; make batches smaller")
