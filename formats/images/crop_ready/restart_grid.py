"""The restart grid of a JPEG: a table of its segments, by which a part is cut out without decoding.

At a restart marker the predictors of a JPEG's scan are reset and its bits begin at a byte (ITU-T T.81,
F.1.1.5). With a marker after every R minimum coded units (MCUs), and R a divisor of those in a row, the
scan is a grid of independent segments, each R MCUs wide and one MCU high. The headers with another height and
width, the segments of a rectangle, and markers numbered anew are a JPEG of that rectangle: any decoder gives
the same pixels for it, except within two pixels of the cut, where the colours of the neighbours are missing.

The table is an APP15 segment before the first other header. It also keeps the SHA-256 of the image that the
grid was made from.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.kinds.jpeg import MAX_MARKERS

from .crop import Crop

if TYPE_CHECKING:
    from shardprep.formats.images.decoder import Encoded

SIGNATURE = b"shardprep\0"
VERSION = 1
TABLE = struct.Struct("<10sB32sHHBBHHHH")
MAX_SEGMENTS = (65_533 - TABLE.size) // 2  # the payload of a marker segment has at most 65,533 bytes
MARGIN = 2  # pixels beside a crop that chroma upsampling reads, for each pixel of the decoded size

EOI, COM, APP0, APP14, APP15 = 0xD9, 0xFE, 0xE0, 0xEE, 0xEF
SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1})  # baseline and extended; both Huffman-coded
APPLICATION = frozenset({COM, *range(APP0, APP15 + 1)})
_RESTARTS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), MAX_SEGMENTS)

# After the end marker: libjpeg-turbo decodes an MCU of six blocks quickly only with so many bytes ahead.
_AHEAD = bytes(512 * 6)

Bytes = npt.NDArray[np.uint8]


class Cut(NamedTuple):
    """A JPEG of a part of an image; its pixel (0, 0) is the image's pixel (``x``, ``y``)."""

    image: Bytes
    x: int
    y: int


class RestartGrid(NamedTuple):
    """The table of a crop-ready image.

    ``sha256`` is that of the original image. ``width`` and ``height`` are in stored pixels. ``mcu_width`` and
    ``mcu_height`` are in pixels, ``interval`` is the number of MCUs in a segment, ``columns`` the number of
    segments in a row. ``header`` and ``scan`` are the offsets of the first header after the table and of the
    first segment; ``frame`` is the offset of the frame's header from ``header``. ``lengths`` are those of the
    segments in bytes, without their markers.
    """

    sha256: bytes
    width: int
    height: int
    mcu_width: int
    mcu_height: int
    interval: int
    columns: int
    header: int
    scan: int
    frame: int
    lengths: npt.NDArray[np.uint16]

    def cut(self, image: Encoded, crop: Crop, *, reduction: int = 1) -> Cut | None:
        """Return the part of ``image`` that has the pixels of ``crop``, also when decoded at 1/``reduction``.

        None if the bytes do not have a restart marker where the table says.
        """
        across, down = self.mcu_width * self.interval, self.mcu_height
        margin = MARGIN * reduction
        left, top = max(0, crop.x - margin) // across, max(0, crop.y - margin) // down
        rows = len(self.lengths) // self.columns
        right = min(self.columns, -(-(crop.x + crop.width + margin) // across))
        bottom = min(rows, -(-(crop.y + crop.height + margin) // down))
        width = min(self.width, right * across) - left * across
        height = min(self.height, bottom * down) - top * down
        made = self._joined(image, (left, top, right, bottom), width, height)
        return None if made is None else Cut(made, left * across, top * down)

    def _joined(
        self, image: Encoded, segments: tuple[int, int, int, int], width: int, height: int
    ) -> Bytes | None:
        left, top, right, bottom = segments
        steps = self.lengths.astype(np.int64) + 2
        stops = (np.cumsum(steps) + self.scan).reshape(-1, self.columns)[top:bottom]
        chosen = steps.reshape(-1, self.columns)[top:bottom, left:right]
        begins = (stops[:, left] - chosen[:, 0]).tolist()
        ends = stops[:, right - 1].tolist()
        view = memoryview(image)
        head = bytearray(view[self.header - 2 : self.scan])
        head[:2] = b"\xff\xd8"
        struct.pack_into(">HH", head, 2 + self.frame + 5, height, width)
        parts = [view[begin:end] for begin, end in zip(begins, ends, strict=True)]
        made = np.frombuffer(bytearray().join([head, *parts, _AHEAD]), np.uint8)
        markers = np.cumsum(chosen.reshape(-1)) + (len(head) - 1)
        found = made[markers]
        made[markers] = _RESTARTS[: len(markers)]
        made[markers[-1]] = EOI
        numbers = (np.arange(top, bottom)[:, None] * self.columns + np.arange(left, right)).reshape(-1)
        expected = _RESTARTS[numbers]
        if bottom * self.columns == len(self.lengths) and right == self.columns:
            expected[-1] = EOI
        return made if (found == expected).all() and (made[markers - 1] == 0xFF).all() else None


def grid_of(image: Encoded) -> RestartGrid | None:
    """Return the restart grid of a crop-ready image; None if it has no table, or one that does not fit it.

    Only the table is checked, and that its offsets are within ``image``. Whether the bytes are as it says is
    known for the images of a crop-ready dataset.
    """
    found = _table_at(image)
    if found is None:
        return None
    at, header = found
    signature, version, sha256, *numbers = TABLE.unpack_from(image, at)
    width, height, mcu_width, mcu_height, interval, columns, frame, size = numbers
    lengths = np.frombuffer(image, "<u2", (header - at - TABLE.size) // 2, at + TABLE.size)
    grid = RestartGrid(
        sha256, width, height, mcu_width, mcu_height, interval, columns, header,
        header + size, frame, lengths,
    )  # fmt: skip
    return grid if signature == SIGNATURE and version == VERSION and _fits(grid, image) else None


def _table_at(image: Encoded) -> tuple[int, int] | None:
    """Return the offsets of the table and of the header after it."""
    at, end = 2, len(image) - 4
    for _ in range(MAX_MARKERS):
        if at > end or image[at] != 0xFF or image[at + 1] not in APPLICATION:
            return None
        stop = at + 2 + (image[at + 2] << 8 | image[at + 3])
        if image[at + 1] == APP15 and image[at + 4 : at + 14] == SIGNATURE:
            fits = stop <= len(image) and stop - at - 4 >= TABLE.size
            return (at + 4, stop) if fits else None
        at = stop
    return None


def _fits(grid: RestartGrid, image: Encoded) -> bool:
    """Whether the table's numbers agree with each other, the frame's header and the image's length."""
    if 0 in grid[1:7] or grid.scan > len(image) or grid.header + grid.frame + 9 > grid.scan:
        return False
    frame = image[grid.header + grid.frame : grid.header + grid.frame + 9]
    sides = struct.pack(">HH", grid.height, grid.width)
    across = -(-grid.width // grid.mcu_width)
    down = -(-grid.height // grid.mcu_height)
    return (
        frame[0] == 0xFF
        and frame[1] in SEQUENTIAL_FRAMES
        and frame[5:] == sides
        and grid.columns * grid.interval == across
        and grid.columns * down == len(grid.lengths)
        and grid.scan + int(grid.lengths.sum(dtype=np.int64)) + 2 * len(grid.lengths) == len(image)
    )
