"""A disk profile as a bar chart: lines of text, or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.opencv import cv2
from shardprep.formats.runtime.files import user_path
from shardprep.loaders.measuring.disk import DiskProfile, Reads

WIDTH, LEFT, RIGHT, ROW, MARGIN = 900, 300, 150, 26, 20  # pixels
BLACK, GRAY = (30, 30, 30), (90, 90, 90)
COLOURS = {"cold": (170, 110, 40), "warm": (40, 130, 230)}  # blue and orange, in OpenCV's order


class Bar(NamedTuple):
    """A bar for a rate in bytes per second; ``state`` is "cold" or "warm"."""

    label: str
    state: str
    rate: float

    @property
    def text(self) -> str:
        return f"{self.rate / 1e6:,.0f} MB/s"


def read_rows(profile: DiskProfile) -> list[tuple[str, Reads]]:
    """Return the reads of files and shards with their labels, without those of small files."""
    rows: list[tuple[str, Reads]] = [("loader's pattern", profile.stream)]
    rows += [(f"sequential, {r.block_name}", r) for r in profile.sequential]
    return rows + [(f"random, {r.queue_depth} at once", r) for r in profile.random]


def bars(profile: DiskProfile) -> list[Bar]:
    """Return the bars of the reads that were measured, cold before warm."""
    rows = read_rows(profile)
    if profile.small_files:
        rows += [("small files", profile.small_files.files)]
    return [
        Bar(label, state, rate)
        for state in ("cold", "warm")
        for label, reads in rows
        if (rate := reads.rate(state)) is not None
    ]


def terminal_lines(rows: Sequence[Bar], *, width: int = 40, mark: str = "█") -> list[str]:
    """Return a line for each bar; cold and warm have separate scales."""
    left = max((len(row.label) for row in rows), default=0)
    most = {row.state: max(r.rate for r in rows if r.state == row.state) for row in rows}
    return [
        f"{row.state}  {row.label:<{left}}  {mark * max(1, round(width * row.rate / most[row.state]))} {row.text}"
        for row in rows
    ]


def save_picture(profile: DiskProfile, path: str | PathLike[str]) -> None:
    """Write the bars as a PNG. Raises UsageError unless the name ends in .png, OSError."""
    path = user_path(path)
    if path.suffix.lower() != ".png":
        raise UsageError("must be a picture: give it a name that ends in .png", path=path)
    _, data = cv2.imencode(".png", picture(profile))
    path.write_bytes(data.tobytes())


def picture(profile: DiskProfile) -> npt.NDArray[np.uint8]:
    """Draw the bars: uint8 [height, 900, 3] in BGR; cold and warm have separate scales."""
    rows = bars(profile)
    states = list(dict.fromkeys(row.state for row in rows))
    canvas = np.full((2 * MARGIN + ROW * (len(rows) + 2 * len(states) + 1), WIDTH, 3), 255, np.uint8)
    y = MARGIN + ROW
    _write(canvas, f"{profile.kind} on {profile.filesystem or 'this disk'}", MARGIN, y, BLACK)
    for state in states:
        of_state = [row for row in rows if row.state == state]
        y += 2 * ROW
        _write(canvas, state, MARGIN, y, COLOURS[state])
        longest = max(row.rate for row in of_state)
        for row in of_state:
            y += ROW
            end = LEFT + max(1, round((WIDTH - LEFT - RIGHT) * row.rate / max(longest, 1e-9)))
            cv2.rectangle(canvas, (LEFT, y - 14), (end, y + 4), COLOURS[state], cv2.FILLED)
            _write(canvas, row.label, MARGIN, y, GRAY)
            _write(canvas, row.text, end + 8, y, BLACK)
    return canvas


def _write(canvas: npt.NDArray[np.uint8], text: str, x: int, y: int, colour: tuple[int, int, int]) -> None:
    ascii_text = text.encode("ascii", "replace").decode()  # all that OpenCV's fonts have
    cv2.putText(canvas, ascii_text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA)
