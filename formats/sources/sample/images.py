"""The images of a sample: crops of the photographs, with the oddities of the real set."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from .plan import Oddity, SampleImage

JPEG_QUALITY = 92
LONGER_SIDE = (400, 500)  # pixels; the real set's mean is 473x406
PNG_SIDE = 200  # an RGBA PNG of full size would be larger than its whole class
MARKER_COMMENT, MARKER_EXIF = 0xFE, 0xE1

Pixels = npt.NDArray[np.uint8]

ORIENTATIONS = {  # EXIF value, counter-clockwise quarter turns from upright to stored, byte order
    Oddity.EXIF_6: (6, 1, ">"),
    Oddity.EXIF_3: (3, 2, "<"),
    Oddity.EXIF_8: (8, 3, ">"),
}
TINY = {Oddity.TINY_20X17: (20, 17), Oddity.TINY_8X8: (8, 8)}


@dataclass(frozen=True)
class Album:
    """The photographs, by name, as BGR uint8 [H, W, 3]; ``cmyk`` is a finished JPEG of photograph 1.

    ``on_draw`` is called before each image is drawn.
    """

    names: tuple[str, ...]
    photographs: tuple[Pixels, ...]
    cmyk: bytes
    on_draw: Callable[[], None] | None = None

    @classmethod
    def load(cls, on_draw: Callable[[], None] | None = None) -> Album:
        """Return the photographs in the package."""
        folder = resources.files("shardprep.formats.sources.sample.photographs")
        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name.endswith(".jpg")}
        cmyk = files.pop("cmyk.jpg")
        names = tuple(sorted(files))
        return cls(names, tuple(_decode(files[name]) for name in names), cmyk, on_draw)

    def draw(self, image: SampleImage) -> bytes:
        """Return the encoded image. Deterministic for the same releases of OpenCV and NumPy."""
        if self.on_draw is not None:
            self.on_draw()
        if image.oddity is Oddity.CMYK:
            return insert_segment(self.cmyk, MARKER_COMMENT, image.key.encode())
        pixels = _crop(self.photographs[image.photograph], np.random.default_rng(image.seed))
        return _encode(pixels, image.oddity)


@contextmanager
def single_threaded_opencv() -> Iterator[None]:
    """Keep OpenCV from starting threads: the images are small, and a later fork would lose the threads."""
    import cv2  # start-up time, here and below

    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def _decode(jpeg: bytes) -> Pixels:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    return np.asarray(pixels, np.uint8)


def _crop(photograph: Pixels, rng: np.random.Generator) -> Pixels:
    """Return a crop of 40 to 100 % of each side, mirrored or not, a little brighter or darker."""
    height, width = (round(side * share) for side, share in zip(photograph.shape, _shares(rng), strict=False))
    top = rng.integers(photograph.shape[0] - height + 1)
    left = rng.integers(photograph.shape[1] - width + 1)
    pixels = photograph[top : top + height, left : left + width]
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    light = np.clip(np.arange(256) * rng.uniform(0.85, 1.15), 0, 255).astype(np.uint8)
    scale = rng.integers(*LONGER_SIDE, endpoint=True) / max(height, width)
    return _resize(light[pixels], round(width * scale), round(height * scale))


def _shares(rng: np.random.Generator) -> tuple[float, float]:
    share = rng.uniform(0.5, 1.0)
    other = share * rng.uniform(0.8, 1.0)
    return (share, other) if rng.random() < 0.5 else (other, share)


def _resize(pixels: Pixels, width: int, height: int) -> Pixels:
    import cv2

    # the plain bilinear filter may round differently from one CPU to the next
    resized = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)
    return np.asarray(resized, np.uint8)


def _encode(pixels: Pixels, oddity: Oddity | None) -> bytes:
    import cv2

    if oddity is Oddity.PNG:
        return _png(pixels)
    if oddity is Oddity.GRAYSCALE:
        return _jpeg(np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY), np.uint8))
    if oddity is Oddity.PROGRESSIVE:
        return _jpeg(pixels, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    if oddity is Oddity.CORRUPT_EXIF:
        return insert_segment(_jpeg(pixels), MARKER_EXIF, corrupt_exif())
    if oddity in ORIENTATIONS:
        orientation, quarter_turns, order = ORIENTATIONS[oddity]
        return insert_segment(_jpeg(np.rot90(pixels, quarter_turns)), MARKER_EXIF, exif(orientation, order))
    return _jpeg(_resize(pixels, *TINY[oddity]) if oddity in TINY else pixels)


def _jpeg(pixels: Pixels, *options: int) -> bytes:
    import cv2

    parameters = (cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, *options)
    return bytes(cv2.imencode(".jpg", np.ascontiguousarray(pixels), parameters)[1])


def _png(pixels: Pixels) -> bytes:
    import cv2

    height, width = pixels.shape[:2]
    small = _resize(pixels, PNG_SIDE, round(height * PNG_SIDE / width))
    return bytes(cv2.imencode(".png", cv2.cvtColor(small, cv2.COLOR_BGR2BGRA))[1])


def insert_segment(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    """Return ``jpeg`` with one more segment after its start; ``payload`` has at most 65,533 bytes."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload + jpeg[2:]


def exif(orientation: int, order: str) -> bytes:
    """Return an APP1 payload with the orientation alone; ``order`` is ``<`` (Intel) or ``>`` (Motorola)."""
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    directory = struct.pack(order + "IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return b"Exif\0\0" + magic + directory


def corrupt_exif() -> bytes:
    """Return an APP1 payload with its directory far outside of it."""
    return b"Exif\0\0" + struct.pack(">4sI", b"MM\0*", 0x7FFFFFF0) + b"\xff" * 24
