"""What a loader delivered beside what its disk can do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .disk import DiskProfile
from .loader_speed import LoaderSpeed

NEAR = 0.7  # the share of the disk's rate from which on a loader that waits for it has what there is


@dataclass(frozen=True)
class AgainstDisk:
    """Bytes per second: what the loader delivered, and what the disk reads in the loader's pattern.

    ``cold`` and ``warm`` are None where they were not measured. ``limit`` is the stage that limited the loader.
    """

    delivered: float
    cold: float | None
    warm: float | None
    limit: str

    @classmethod
    def of(cls, speed: LoaderSpeed, disk: DiskProfile) -> AgainstDisk:
        cold, warm = (found.median if found else None for found in (disk.stream.cold, disk.stream.warm))
        return cls(speed.bytes_per_second, cold, warm, speed.verdict.limit if speed.verdict else "")

    @property
    def sentence(self) -> str:
        """Whether it is the disk that limits."""
        delivered = f"{self.delivered / 1e6:,.0f} MB/s"
        if self.cold is None:
            return f"The loader delivers {delivered}; what this disk reads cold is not known."
        reads = f"this disk reads {self.cold / 1e6:,.0f} MB/s cold"
        if self.limit != "read":
            enough = (
                "which is enough" if self.cold > self.delivered else "which a cold epoch would be limited by"
            )
            return f"Not disk-bound: the loader delivers {delivered}; {reads}, {enough}."
        if self.delivered < NEAR * self.cold:
            return (
                f"Reading limits at {delivered}, but {reads}: something else uses it, or more workers would."
            )
        return f"Disk-bound at {delivered}; {reads}."

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types."""
        return asdict(self) | {"sentence": self.sentence}
