"""Writing and checking the table of a restart grid. Nothing is decoded."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import numpy as np

from shardprep.formats.errors import BadImage
from shardprep.formats.images.kinds.image_info import ImageFlag, ImageInfo
from shardprep.formats.images.kinds.jpeg import marker_segments

from .restart_grid import (
    APPLICATION,
    EOI,
    MAX_SEGMENTS,
    SEQUENTIAL_FRAMES,
    SIGNATURE,
    TABLE,
    VERSION,
    grid_of,
)

SEGMENT_WIDTH = 32  # pixels; wider segments make smaller files, and more pixels that are decoded in vain
SEGMENT_BYTES = 250  # at least, if segments are to be wider for it; a segment costs about 6 bytes
FEWEST_SEGMENTS = 4
SAMPLINGS = frozenset({(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)})  # of luma, with both chromas 1x1
APP15, DRI = 0xEF, 0xDD


class NotCropReady(Exception):
    """The image stays as it is; the text says why, so that images can be counted by it."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The frame of a sequential JPEG; ``mcu_width`` and ``mcu_height`` are in pixels."""

    width: int
    height: int
    mcu_width: int
    mcu_height: int

    @property
    def mcus(self) -> tuple[int, int]:
        """The number of MCUs in a row, and of rows."""
        return -(-self.width // self.mcu_width), -(-self.height // self.mcu_height)

    def interval(self, size: int) -> int:
        """The number of MCUs in a segment of an image of ``size`` bytes.

        It is the divisor of a row's MCUs with the ratio nearest to one to that of the wanted segments.
        """
        across, down = self.mcus
        wanted = max(SEGMENT_WIDTH / self.mcu_width, SEGMENT_BYTES * across * down / size)
        divisors = [n for n in range(1, across + 1) if across % n == 0]
        allowed = [n for n in divisors if FEWEST_SEGMENTS <= across // n * down <= MAX_SEGMENTS]
        if not allowed:
            raise NotCropReady("too few or too many pixels")
        return min(allowed, key=lambda n: abs(math.log(n / wanted)))


def grid_interval(image: bytes) -> int:
    """Return the number of MCUs in a segment for a JPEG. Raises NotCropReady, BadImage."""
    return _frame(image).interval(len(image))


def with_grid(image: bytes, sha256: bytes) -> bytes:
    """Return a sequential JPEG of one scan with the table of its segments; ``sha256`` is the original's.

    Raises BadImage unless the scan has a restart marker after each segment, and nothing after its end.
    """
    frame, before, frame_at, interval, scan = _frame(image), None, 0, 0, 0
    for marker, start, stop in marker_segments(image):
        scan = stop
        if before is None and marker not in APPLICATION:
            before = start - 4
        if marker in SEQUENTIAL_FRAMES:
            frame_at = start - 4
        elif marker == DRI:
            (interval,) = struct.unpack_from(">H", image, start)
    columns, remainder = divmod(frame.mcus[0], interval) if interval else (0, 1)
    lengths = _lengths(image, scan)
    if remainder or before is None or len(lengths) != columns * frame.mcus[1]:
        raise BadImage("a JPEG with restart markers that are no grid")
    table = TABLE.pack(
        SIGNATURE, VERSION, sha256, frame.width, frame.height, frame.mcu_width, frame.mcu_height,
        interval, columns, frame_at - before, scan - before,
    ) + lengths.tobytes()  # fmt: skip
    segment = b"\xff\xef" + struct.pack(">H", len(table) + 2) + table
    return b"".join((image[:before], segment, image[before:]))


def without_grid(image: bytes) -> bytes:
    """Return a JPEG without tables of segments. Raises BadImage where it is malformed."""
    kept, at = [], 0
    for marker, start, stop in marker_segments(image):
        if marker == APP15 and image.startswith(SIGNATURE, start):
            kept.append(image[at : start - 4])
            at = stop
    return b"".join((*kept, image[at:])) if kept else image


def grid_is_sound(image: bytes, sha256: bytes) -> bool:
    """Whether the table of a crop-ready image, of the original with this digest, is that of its bytes."""
    try:
        return with_grid(without_grid(image), sha256) == image
    except (BadImage, NotCropReady):
        return False


def marked(image: bytes, info: ImageInfo) -> ImageInfo:
    """Return the properties, with CROP_READY if the image has a table of segments that fits its bytes."""
    grid = grid_of(image)
    if grid is None or not grid_is_sound(image, grid.sha256):
        return info
    return replace(info, flags=info.flags | ImageFlag.CROP_READY)


def _frame(image: bytes) -> _Frame:
    """Return the frame. Raises NotCropReady for one of other samplings, BadImage without one."""
    for marker, start, _ in marker_segments(image):
        if 0xC0 <= marker <= 0xC2:
            _, height, width, components = struct.unpack_from(">BHHB", image, start)
            factors = [divmod(image[start + 7 + 3 * n], 16) for n in range(components)]
            names = image[start + 6 : start + 6 + 3 * components : 3]
            if components == 1:
                return _Frame(width, height, 8, 8)
            if factors[0] not in SAMPLINGS or factors[1:] != [(1, 1), (1, 1)] or names == b"RGB":
                raise NotCropReady("of an unusual sampling or colour space")
            return _Frame(width, height, 8 * factors[0][0], 8 * factors[0][1])
    raise NotCropReady("not a baseline or progressive JPEG")


def _lengths(image: bytes, scan: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return the lengths of the segments of a scan that goes from ``scan`` to the image's end."""
    data = np.frombuffer(image, np.uint8, offset=scan)
    ends = np.flatnonzero((data[:-1] == 0xFF) & (data[1:] != 0))
    markers = data[ends + 1]
    numbers = np.resize(np.arange(0xD0, 0xD8), len(markers))
    numbers[-1:] = EOI
    if not len(ends) or ends[-1] + 2 != len(data) or (markers != numbers).any():
        raise BadImage("a JPEG with other markers in its scan than restarts, or with none")
    lengths = np.diff(ends, prepend=-2) - 2
    if lengths.max() > 0xFFFF or len(lengths) > MAX_SEGMENTS:
        raise BadImage("a JPEG with too many or too large segments")
    return lengths.astype("<u2")
