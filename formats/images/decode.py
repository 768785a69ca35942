"""Decoding of images, guarded against input that crashes the decoder, and the comparison of decoders.

Two decoders may decode one JPEG to different pixels, both within the standard. A model trained with one and
evaluated with the other silently loses accuracy. Canaries, small images shipped with the package, reveal it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.header import MAX_PIXELS, PNG_SIGNATURE, TOO_MANY, remove_animation

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

import cv2

# Other packages, such as opencv-python, install a cv2 in the same place, and pip does not check its version.
if tuple(map(int, cv2.__version__.split(".")[:2])) < (4, 13):
    raise ImportError(
        f"OpenCV {cv2.__version__} decodes truncated or turned images wrongly: uninstall other packages "
        "of OpenCV, and install opencv-python-headless 4.13 or newer"
    )

__all__ = ["cv2"]


Encoded = bytes | bytearray | memoryview

REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
}
"""The flag, beside one of the colours, that decodes at 1/n of the size, by n."""


def decode(image: Encoded, flags: int, *, key: str | None = None) -> npt.NDArray[np.uint8]:
    """Decode an image with ``flags`` (``cv2.IMREAD_...``), and return its pixels.

    An animated PNG gives its still image. The array is new and writable. Thread-safe; releases the GIL while
    decoding. Raises BadImage, with ``key``, if the bytes do not decode or give more than MAX_PIXELS, and
    MemoryError if memory is short, which says nothing about the image.
    """
    is_swapped = flags > 0 and flags & cv2.IMREAD_COLOR_RGB and image[4:8] == b"ftyp"
    if is_swapped:  # OpenCV 5.0 decodes an AVIF with alpha to BGR even if RGB is requested
        flags = flags & ~cv2.IMREAD_COLOR_RGB | cv2.IMREAD_COLOR
    try:
        if bytes(image[: len(PNG_SIGNATURE)]) == PNG_SIGNATURE:
            image = remove_animation(bytes(image))
        pixels: Any = cv2.imdecode(np.frombuffer(image, np.uint8), flags) if len(image) else None
        if is_swapped and pixels is not None:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    except (BadImage, cv2.error) as error:
        if getattr(error, "code", 0) == cv2.Error.StsNoMem:
            raise MemoryError("not enough memory for an image's pixels") from error
        if "CV_IO_MAX_IMAGE" in str(error):
            raise BadImage(f"too large: {TOO_MANY}", key=key) from error
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}", key=key) from error
    if pixels is None:
        raise BadImage("does not decode", key=key)
    return pixels  # type: ignore[no-any-return]


def check_decodes(image: bytes) -> None:
    """Decode an image and discard the pixels. Raises BadImage if it does not decode."""
    decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)


def crash_reason(signal: str) -> str:
    return f"crashes the decoder ({signal})"


def encode_png(pixels: npt.NDArray[Any]) -> bytes:
    """Encode RGB pixels, uint8 [height, width, 3], as PNG."""
    return bytes(cv2.imencode(".png", pixels[..., ::-1])[1])


CANARIES = Path(__file__).resolve().parent.parent / "data" / "canaries"
PIXELS = CANARIES / "pixels.tsv"  # name, reduction and digest of the pixels
RESIZED = "resized "  # before the name of a canary; OpenCV's wheels for ARM resize with KleidiCV and Carotene


class DecoderDiffers(UserWarning):
    """This machine's decoder produces different pixels than other machines do."""


def canary_row(name: str, reduction: int) -> tuple[str, str, str]:
    """Return name, reduction and a digest (16 hexadecimal digits) of a canary's pixels on this machine."""
    flags = cv2.IMREAD_COLOR | REDUCED[reduction] | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels: npt.NDArray[Any] = decode((CANARIES / name.removeprefix(RESIZED)).read_bytes(), flags)
    except BadImage:  # the decoder was built without this format
        return name, str(reduction), "0" * 16
    if name.startswith(RESIZED):
        pixels = cv2.resize(pixels, (64, 44))
    digest = hashlib.sha256(b"%d %d " % pixels.shape[:2] + pixels.tobytes()).hexdigest()
    return name, str(reduction), digest[:16]


class DecoderCheck(NamedTuple):
    """This machine's decoder compared with the reference.

    Attributes:
        digest: 16 hexadecimal digits, equal on all machines that decode to the same pixels.
        reference: The reference digest.
        differing: Names of the images whose pixels differ.
    """

    digest: str
    reference: str
    differing: tuple[str, ...]


@cache
def check_decoder() -> DecoderCheck:
    """Decode all canaries (about 5 ms, once per process)."""
    reference = [tuple(line.split("\t")) for line in PIXELS.read_text("utf-8").splitlines()]
    here = [canary_row(name, int(reduction)) for name, reduction, _ in reference]
    differing = (mine[0] for mine, row in zip(here, reference, strict=True) if mine != row)
    return DecoderCheck(_digest(here), _digest(reference), tuple(dict.fromkeys(differing)))


def _digest(rows: Iterable[Iterable[str]]) -> str:
    return hashlib.sha256("\n".join(map("\t".join, rows)).encode()).hexdigest()[:16]


@cache
def warn_of_decoder() -> None:
    """Warn with DecoderDiffers, once per process, if this machine's decoder differs from the reference."""
    if differing := [name for name in check_decoder().differing if not name.startswith(RESIZED)]:
        _warn(f"decodes some images ({', '.join(differing)}) to different pixels than the reference")


def warn_of_other_decoder(digest: str) -> None:
    """Warn with DecoderDiffers if the digest of another machine's :class:`DecoderCheck` differs."""
    if digest != check_decoder().digest:
        _warn("produces different pixels from the same images than this run's previous decoder")


def _warn(what: str) -> None:
    warnings.warn(
        f"OpenCV {cv2.__version__} for {platform.machine()} {what}, and mixing decoders may cost a model accuracy: "
        "train and evaluate with opencv-python-headless of the package index, on processors of one architecture",
        DecoderDiffers,
        stacklevel=4,  # the caller of the loader
    )


Decoder = Callable[[Encoded], npt.NDArray[np.uint8]]


@cache
def jpeg_decoder() -> Decoder | None:
    """Return simplejpeg's decoder to RGB; None if it is not installed, or decodes a canary unlike OpenCV.

    The decoder raises ValueError for an image it refuses, such as a damaged one. It ignores EXIF and releases
    the GIL. The comparison takes about 5 ms, once per process.
    """
    try:
        from simplejpeg import decode_jpeg  # an extra
    except ImportError:
        return None
    decoder: Any = partial(decode_jpeg, colorspace="RGB", fastdct=False, fastupsample=False)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        jpegs = [path.read_bytes() for path in CANARIES.glob("*.jpg")]
        is_same = all(np.array_equal(decoder(image), decode(image, flags)) for image in jpegs)
    except ValueError:  # it refuses an intact image
        return None
    return decoder if is_same else None


def decoder_name() -> str:
    return f"simplejpeg {version('simplejpeg')}" if jpeg_decoder() else f"OpenCV {cv2.__version__}"
