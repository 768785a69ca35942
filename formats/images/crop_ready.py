"""Crop-ready JPEGs: a grid of restart markers lets a rectangle be cut out before decoding.

This module shrinks an image, adds its grid, checks it, and cuts rectangles out of it. libjpeg-turbo's
jpegtran, run without a shell, adds the markers without changing the coefficients; no wheel can do that.

At a restart marker the predictors of the scan are reset and its bits begin at a byte (ITU-T T.81, F.1.1.5).
With a marker after every R minimum coded units (MCUs), where R divides the MCUs of a row, the scan is a grid
of independent segments, each R MCUs wide and one MCU high. The headers with a new height and width, followed
by the segments of a rectangle with renumbered markers, are a JPEG of that rectangle. Any decoder gives the
same pixels for it, except within two pixels of the cut, where the neighbours' colours are missing.

The table of segments is an APP15 segment after the image's other application segments and before all other
headers. It also has the original image's SHA-256.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shutil
import struct
import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, OperationError
from shardprep.formats.images.decode import Encoded, cv2, decode
from shardprep.formats.images.header import (
    DEFAULT_QUALITY,
    MAX_GROWTH,
    MAX_JPEG_SIDE,
    MAX_MARKERS,
    ImageFlag,
    ImageInfo,
    marker_segments,
    parse_frame,
    png_orientation,
    read_image_header,
)
from shardprep.formats.runtime.files import memory_file


class Crop(NamedTuple):
    """A rectangle of whole pixels inside an image."""

    x: int
    y: int
    width: int
    height: int

    def aligned(self, step: int) -> Crop:
        """Return the crop with its position and size rounded down to multiples of ``step``."""
        return Crop(*(side // step * step for side in self))

    @property
    def area(self) -> int:
        return self.width * self.height

    def contains(self, other: Crop) -> bool:
        return self.union(other) == self

    def union(self, other: Crop) -> Crop:
        """Return the smallest crop that contains both."""
        x, y = min(self.x, other.x), min(self.y, other.y)
        right = max(self.x + self.width, other.x + other.width)
        bottom = max(self.y + self.height, other.y + other.height)
        return Crop(x, y, right - x, bottom - y)

    def scaled(self, by: int, width: int, height: int) -> Crop:
        """Return the crop enlarged ``by`` times, clipped to ``width`` and ``height``."""
        x, y = self.x * by, self.y * by
        return Crop(x, y, min(width - x, self.width * by), min(height - y, self.height * by))


SIGNATURE = b"shardprep\0"
VERSION = 1
TABLE = struct.Struct("<10sB32sHHBBHHHH")
_EXIF_ORIENTATION = (
    b"\xff\xe1\0\x22Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0%c\0\0\0\0\0\0"  # EXIF with an orientation
)
MAX_SEGMENTS = (65_533 - TABLE.size) // 2  # the payload of a marker segment has at most 65,533 bytes
MARGIN = 2  # decoded pixels beside a crop that chroma upsampling reads

EOI, COM, APP0, APP14, APP15 = 0xD9, 0xFE, 0xE0, 0xEE, 0xEF
SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1})  # baseline and extended; both Huffman-coded
APPLICATION = frozenset({COM, *range(APP0, APP15 + 1)})
_RESTARTS = np.resize(np.arange(0xD0, 0xD8, dtype=np.uint8), MAX_SEGMENTS)

# After the end marker: libjpeg-turbo's fast path for an MCU of six blocks needs this many bytes ahead.
AHEAD = bytes(512 * 6)

Bytes = npt.NDArray[np.uint8]


class Cut(NamedTuple):
    """A JPEG of a part of an image; its pixel (0, 0) is the image's pixel (``x``, ``y``)."""

    image: Bytes
    x: int
    y: int


class RestartGrid(NamedTuple):
    """The table of a crop-ready image.

    ``sha256`` is the original image's. ``width``, ``height``, ``mcu_width`` and ``mcu_height`` are in stored
    pixels. ``interval`` is the number of MCUs per segment, ``columns`` the number of segments per row.
    ``header`` and ``scan`` are the offsets of the first header after the table and of the first segment;
    ``frame`` is the offset of the frame header from ``header``. ``lengths`` are the segments' sizes in bytes,
    without markers. ``adobe`` is the segment that says that the samples are RGB, if there is one.
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
    adobe: bytes

    def cut(self, image: Encoded, crop: Crop, *, reduction: int = 1) -> Cut | None:
        """Return a JPEG that contains the pixels of ``crop``; None if the bytes contradict the table."""
        across, down = self.mcu_width * self.interval, self.mcu_height
        margin = MARGIN * reduction
        left, top = max(0, crop.x - margin) // across, max(0, crop.y - margin) // down
        rows = len(self.lengths) // self.columns
        right = min(self.columns, -(-(crop.x + crop.width + margin) // across))
        bottom = min(rows, -(-(crop.y + crop.height + margin) // down))
        width = min(self.width, right * across) - left * across
        height = min(self.height, bottom * down) - top * down
        steps = np.add(self.lengths, 2, dtype=np.int64).reshape(-1, self.columns)
        stops = steps.cumsum().reshape(-1, self.columns)
        begins = (stops[top:bottom, left] - steps[top:bottom, left]).tolist()
        ends = stops[top:bottom, right - 1].tolist()
        view = memoryview(image)
        head = bytearray(view[self.header - 2 : self.scan])
        head[:2] = b"\xff\xd8" + self.adobe
        struct.pack_into(">HH", head, 2 + len(self.adobe) + self.frame + 5, height, width)
        scan = view[self.scan :]
        parts = [scan[begin:end] for begin, end in zip(begins, ends, strict=True)]
        jpeg = np.frombuffer(bytearray().join([head, *parts, AHEAD]), np.uint8)
        markers = steps[top:bottom, left:right].cumsum() + (len(head) - 1)
        stored = jpeg[markers].tobytes()
        jpeg[markers] = _RESTARTS[: len(markers)]
        jpeg[markers[-1]] = EOI
        expected = _RESTARTS[: len(self.lengths)].reshape(-1, self.columns)[top:bottom, left:right].tobytes()
        if bottom == rows and right == self.columns:
            expected = expected[:-1] + bytes([EOI])
        # of bytes, because comparing arrays takes three times as long
        is_sound = stored == expected and jpeg[markers - 1].tobytes() == b"\xff" * len(markers)
        return Cut(jpeg, left * across, top * down) if is_sound else None


def read_grid(image: Encoded) -> RestartGrid | None:
    """Return the grid of a crop-ready image; None without a table that fits the image."""
    header, end = 2, len(image) - 4
    adobe, is_jfif = b"", False  # JFIF takes precedence: it has no RGB
    for _ in range(MAX_MARKERS):
        at = header
        if at > end or image[at] != 0xFF or image[at + 1] not in APPLICATION:
            return None
        header = at + 2 + (image[at + 2] << 8 | image[at + 3])
        if image[at + 1] == APP15 and image[at + 4 : at + 14] == SIGNATURE:
            break
        is_jfif |= image[at + 1] == APP0 and image[at + 4 : at + 9] == b"JFIF\0"
        if image[at + 1] == APP14 and image[at + 4 : at + 9] == b"Adobe":
            adobe = bytes(image[at:header])
    else:
        return None
    at += 4
    if header > len(image) or header - at < TABLE.size:
        return None
    _, version, sha256, *sizes, frame, length = TABLE.unpack_from(image, at)
    lengths = np.frombuffer(image, "<u2", (header - at - TABLE.size) // 2, at + TABLE.size)
    adobe = adobe if adobe[15:16] == b"\0" and not is_jfif else b""
    grid = RestartGrid._make((sha256, *sizes, header, header + length, frame, lengths, adobe))
    return grid if version == VERSION and _fits(grid, image) else None


def _fits(grid: RestartGrid, image: Encoded) -> bool:
    """Whether the table's numbers agree with each other, the frame's header and the image's length."""
    if 0 in grid[1:7] or grid.scan > len(image) or grid.header + grid.frame + 9 > grid.scan:
        return False
    frame = image[grid.header + grid.frame : grid.header + grid.frame + 9]
    across, down = _Frame(*grid[1:5]).mcus
    return (
        frame[0] == 0xFF
        and frame[1] in SEQUENTIAL_FRAMES
        and frame[5:] == struct.pack(">HH", grid.height, grid.width)
        and grid.columns * grid.interval == across
        and grid.columns * down == len(grid.lengths)
        and grid.scan + int(grid.lengths.sum(dtype=np.int64)) + 2 * len(grid.lengths) == len(image)
    )


SEGMENT_WIDTH = 32  # pixels; wider segments make files smaller, but waste more decoding
SEGMENT_BYTES = 250  # minimum that widens segments; each costs about 6 bytes
MIN_SEGMENTS = 4
SAMPLINGS = frozenset({(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)})  # of luma, with both chromas 1x1
DRI = 0xDD


class NotCropReady(Exception):
    """The image stays as it is, for the reason in the text."""


class _Frame(NamedTuple):
    """The frame of a sequential JPEG; ``mcu_width`` and ``mcu_height`` are in pixels."""

    width: int
    height: int
    mcu_width: int
    mcu_height: int

    @property
    def mcus(self) -> tuple[int, int]:
        """The number of MCUs in a row, and of rows."""
        return -(-self.width // self.mcu_width), -(-self.height // self.mcu_height)


def grid_interval(image: bytes) -> int:
    """Return a segment's MCUs: the divisor of a row's nearest the target. Raises NotCropReady, BadImage."""
    frame = _read_frame(image)
    across, down = frame.mcus
    wanted = max(SEGMENT_WIDTH / frame.mcu_width, SEGMENT_BYTES * across * down / len(image))
    divisors = [n for n in range(1, across + 1) if across % n == 0]
    allowed = [n for n in divisors if MIN_SEGMENTS <= across // n * down <= MAX_SEGMENTS]
    if not allowed:
        raise NotCropReady("too few or too many pixels")
    return min(allowed, key=lambda n: abs(math.log(n / wanted)))


def add_grid(image: bytes, sha256: bytes) -> bytes:
    """Return a sequential JPEG with a table of its segments. Raises BadImage unless they form a grid."""
    frame, segments = _read_frame(image), list(marker_segments(image))
    before = next(start - 4 for marker, start, _ in segments if marker not in APPLICATION)
    frame_at, interval, scan = before, 0, segments[-1][2]
    for marker, start, _ in segments:
        if marker in SEQUENTIAL_FRAMES:
            frame_at = start - 4
        elif marker == DRI:
            (interval,) = struct.unpack_from(">H", image, start)
    columns, remainder = divmod(frame.mcus[0], interval) if interval else (0, 1)
    lengths = _segment_lengths(image, scan)
    places = frame_at - before, scan - before
    if remainder or max(places) > 0xFFFF or len(lengths) != columns * frame.mcus[1]:
        raise BadImage("a JPEG with restart markers that form no grid")
    table = TABLE.pack(SIGNATURE, VERSION, sha256, *frame, interval, columns, *places) + lengths.tobytes()
    segment = b"\xff\xef" + struct.pack(">H", len(table) + 2) + table
    return b"".join((image[:before], segment, image[before:]))


def remove_grid(image: bytes) -> bytes:
    """Return a JPEG without tables of segments. Raises BadImage if it is malformed."""
    pieces, at = [], 0
    for marker, start, stop in marker_segments(image):
        if marker == APP15 and image.startswith(SIGNATURE, start):
            pieces.append(image[at : start - 4])
            at = stop
    return b"".join((*pieces, image[at:])) if pieces else image


def has_correct_grid(image: bytes, sha256: bytes) -> bool:
    """Whether a crop-ready image, made from the original with this digest, has the right table."""
    try:
        return add_grid(remove_grid(image), sha256) == image
    except (BadImage, NotCropReady):
        return False


def flag_crop_ready(image: bytes, info: ImageInfo) -> ImageInfo:
    """Return the properties, with CROP_READY added if the image has a correct table of segments."""
    grid = read_grid(image)
    if grid is None or not has_correct_grid(image, grid.sha256):
        return info
    return replace(info, flags=info.flags | ImageFlag.CROP_READY)


def _read_frame(image: bytes) -> _Frame:
    """Return the frame. Raises NotCropReady for an unsupported JPEG, BadImage for a malformed one."""
    for marker, start, stop in marker_segments(image):
        if 0xC0 <= marker <= 0xC2:
            height, width, components = parse_frame(image[start:stop])
            factors = [divmod(each, 16) for each in image[start + 7 : start + 7 + 3 * components : 3]]
            names = image[start + 6 : start + 6 + 3 * components : 3]
            if components == 1:
                return _Frame(width, height, 8, 8)
            if factors[0] not in SAMPLINGS or factors[1:] != [(1, 1), (1, 1)] or names == b"RGB":
                raise NotCropReady("of an unusual sampling or colour space")
            return _Frame(width, height, 8 * factors[0][0], 8 * factors[0][1])
    raise NotCropReady("not a baseline or progressive JPEG")


def _segment_lengths(image: bytes, scan: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return the sizes of the segments of a scan, from offset ``scan`` to the end of the image."""
    data = np.frombuffer(image, np.uint8, offset=scan)
    ends = np.flatnonzero((data[:-1] == 0xFF) & (data[1:] != 0))
    markers = data[ends + 1]
    numbers = np.resize(np.arange(0xD0, 0xD8), len(markers))
    numbers[-1:] = EOI
    if not len(ends) or ends[-1] + 2 != len(data) or (markers != numbers).any():
        raise BadImage("a JPEG with other markers in its scan than restarts, or with none")
    lengths = np.diff(ends, prepend=-2) - 2
    if lengths.max() > 0xFFFF or len(lengths) > MAX_SEGMENTS:
        raise NotCropReady("of too many or too large segments")
    return lengths.astype("<u2")


PROGRAM = "jpegtran"


@cache
def jpegtran_path() -> str:
    """Return the path of the program. Raises OperationError if it is not installed."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise OperationError(
            f"crop-ready shards need the program {PROGRAM} of libjpeg-turbo: install the package "
            "libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or jpeg-turbo (Homebrew)"
        )
    return path


@cache
def jpegtran_version() -> str:
    """Return the program's version, such as "libjpeg-turbo 2.1.5". Raises OperationError."""
    command = [jpegtran_path(), "-version"]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    output = (done.stdout + done.stderr).decode("utf-8", "replace")
    match = re.search(r"libjpeg-turbo version (\d+(?:\.\d+)+)", output)
    if match is None:
        raise OperationError(f"{jpegtran_path()} is not libjpeg-turbo's: it says {output.strip()[:200]!r}")
    return f"libjpeg-turbo {match[1]}"


def transcode(image: bytes, *, interval: int) -> bytes:
    """Return a sequential JPEG of the same coefficients, with restarts. Raises BadImage, OSError."""
    # in memory: with pipes, a process takes a tenth longer
    files = (os.fdopen(memory_file(), "w+b") for _ in range(3))
    with next(files) as source, next(files) as output, next(files) as errors:
        source.write(image)
        source.seek(0)
        command = [jpegtran_path(), "-optimize", "-copy", "all", "-restart", f"{interval}B"]
        done = subprocess.run(command, stdin=source, stdout=output, stderr=errors, env={}, check=False)
        if done.returncode:
            reason = os.pread(errors.fileno(), 4096, 0).decode("utf-8", "replace").strip()
            raise BadImage(f"{PROGRAM} ended with {done.returncode}: {reason}")
        output.seek(0)
        return output.read()


def encoder_version() -> str:
    """Return the version of the encoder of shrunk images, such as "OpenCV 5.0.0.93"."""
    machine = "" if platform.machine() == "x86_64" else f" for {platform.machine()}"  # ARM shrinks otherwise
    for name in ("opencv-python-headless", "opencv-python"):
        with suppress(PackageNotFoundError):
            return f"OpenCV {version(name)}{machine}"
    return f"OpenCV {cv2.__version__}{machine}"


def make_crop_ready(image: bytes, info: ImageInfo) -> bytes:
    """Return a JPEG with a restart grid, and with the pixels and metadata of ``image``.

    ``info`` has its properties. Bytes after the end of the image are dropped. Raises NotCropReady if it must
    stay as it is, BadImage if it does not decode, and OperationError or OSError if jpegtran cannot run.
    """
    if not image.startswith(b"\xff\xd8") or info.components not in (1, 3):
        raise NotCropReady("not a JPEG of gray or colour")
    interval = grid_interval(image)
    try:
        coded = transcode(remove_grid(image), interval=interval)
        result = add_grid(coded, hashlib.sha256(image).digest())
    except BadImage as error:
        raise NotCropReady("damaged, or encoded in a way that has no segments") from error
    if len(result) > len(image) * MAX_GROWTH:
        raise NotCropReady("larger with segments")
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    if not np.array_equal(decode(image, flags), decode(result, flags)):
        raise NotCropReady("decodes to different pixels when re-encoded")
    return result


def shrink(image: bytes, info: ImageInfo, *, shorter_side: int, quality: int = DEFAULT_QUALITY) -> bytes:
    """Return ``image`` as a crop-ready JPEG with ``shorter_side`` pixels on its shorter side.

    ``info`` has its properties; the longer side is rounded. Gray stays gray; other colour spaces become RGB
    without transparency. A JPEG keeps its EXIF, colour profile and comments, a PNG or WebP its orientation.
    ``quality`` is libjpeg's, 1 to 100; chroma has half the resolution. Raises NotCropReady if the image is
    not larger than ``shorter_side``, or stays too long for libjpeg, BadImage if it does not decode.
    """
    ratio = shorter_side / min(info.width, info.height)
    if ratio >= 1 or ratio * max(info.width, info.height) >= MAX_JPEG_SIDE:
        raise NotCropReady("small enough already, or too long for a JPEG")
    flags = cv2.IMREAD_GRAYSCALE if info.components == 1 else cv2.IMREAD_COLOR
    pixels = decode(image, flags | cv2.IMREAD_IGNORE_ORIENTATION)
    size = (max(1, round(info.width * ratio)), max(1, round(info.height * ratio)))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
    interval = grid_interval(_encode_jpeg(small, options))
    shrunk = _encode_jpeg(small, [*options, cv2.IMWRITE_JPEG_RST_INTERVAL, interval])
    if image.startswith(b"\xff\xd8"):
        metadata = [
            image[start - 4 : stop]
            for marker, start, stop in marker_segments(image)
            if marker in APPLICATION - {APP0, APP14} and not image.startswith(SIGNATURE, start)
        ]
    else:
        turned = png_orientation(image) or info.orientation
        metadata = [_EXIF_ORIENTATION % turned] if turned > 1 else []
    if metadata:
        _, _, after = next(marker_segments(shrunk))  # the segment of JFIF
        shrunk = b"".join((shrunk[:after], *metadata, shrunk[after:]))
    ready = add_grid(shrunk, hashlib.sha256(image).digest())
    if len(ready) > len(image) * MAX_GROWTH:
        raise NotCropReady("larger when shrunk")
    return ready


def _encode_jpeg(pixels: npt.NDArray[Any], options: list[int]) -> bytes:
    done, data = cv2.imencode(".jpg", pixels, options)
    if not done:
        raise BadImage("OpenCV could not encode it")
    return data.tobytes()


def stored_image(
    image: bytes, info: ImageInfo, *, segments: bool, shorter_side: int | None, quality: int
) -> tuple[bytes, ImageInfo]:
    """Return the bytes to store for an image with the properties ``info``, and the properties of these bytes.

    With ``segments`` a JPEG becomes crop-ready. With ``shorter_side``, an image whose shorter side is longer
    is shrunk to that many pixels and encoded at ``quality``. Crop-ready images stay as they are. Raises
    BadImage if an image to change does not decode, OperationError, OSError.
    """
    if shorter_side is not None:
        with suppress(NotCropReady):
            result = shrink(image, info, shorter_side=shorter_side, quality=quality)
            return result, flag_crop_ready(result, read_image_header(result))
    info = flag_crop_ready(image, info)
    if segments and not info.flags & ImageFlag.CROP_READY:
        with suppress(NotCropReady):
            result = make_crop_ready(image, info)
            return result, flag_crop_ready(result, read_image_header(result))
    return image, info
