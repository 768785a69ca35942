"""Measuring writes and flushes to a file without a name."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from .profile import Measurement
from .scratch import noise, room, write_all

BLOCK = 1 << 20
FIRST_BYTES = 4 << 20
MAX_BYTES = 256 << 20


class Writing:
    """The step that measures writing. ``missing`` is why there is no rate; None while there may be one.

    The amount written depends on the rate of the round before: the page cache takes at once what the disk
    needs minutes for.
    """

    title = "write and fsync"
    weight = 1

    def __init__(self, place: Path | None) -> None:
        self.missing = None if place else "no folder beside it is writable"
        self._place = place
        self._rates: list[float] = []
        self._data = memoryview(noise(BLOCK))

    def round(self, seconds: float) -> None:
        """Write for about ``seconds``, flushing included."""
        if self._place is None or self.missing:
            return
        wanted = int(self._rates[-1] * seconds) if self._rates else FIRST_BYTES
        try:
            blocks = max(1, room(self._place, min(wanted, MAX_BYTES)) // BLOCK)
            self._rates.append(self._write(self._place, blocks))
        except OSError as error:
            self.missing = f"could not be measured: {error.strerror or error}"

    def _write(self, place: Path, blocks: int) -> float:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            began = time.perf_counter()
            for _ in range(blocks):
                write_all(file.fileno(), self._data)
            os.fsync(file.fileno())
            return blocks * BLOCK / (time.perf_counter() - began)

    @property
    def rate(self) -> Measurement | None:
        """The median over the rounds; None where there is none."""
        rates = [] if self.missing else self._rates
        return Measurement.of(rates, "write of 1 MiB blocks to a new file, then fsync, both timed")
