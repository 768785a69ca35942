"""How fast a disk feeds training: reading cold and warm, many small files, writing."""

from .measure import measure_disk
from .profile import (
    BlockReads,
    DepthReads,
    DiskProfile,
    Measurement,
    Missing,
    Reads,
    SmallFileReads,
)

__all__ = [
    "BlockReads",
    "DepthReads",
    "DiskProfile",
    "Measurement",
    "Missing",
    "Reads",
    "SmallFileReads",
    "measure_disk",
]
