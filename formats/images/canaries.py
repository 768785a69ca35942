"""Canaries: small images shipped with the package, and the pixels that a decoder should produce from them.

Two decoders may decode one JPEG to different pixels, both within the standard. A model trained with one and
evaluated with the other silently loses accuracy.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decode import REDUCED_COLOR, decode
from shardprep.formats.images.opencv import cv2

FOLDER = Path(__file__).resolve().parent.parent / "data" / "canaries"
PIXELS = "pixels.tsv"  # name, reduction and digest of the pixels


class DecoderDiffers(UserWarning):
    """This machine's decoder produces different pixels than other machines do."""


class Canary(NamedTuple):
    """An image file ``name``, decoded at 1/``reduction`` of its size."""

    name: str
    reduction: int = 1

    def __str__(self) -> str:
        return f"{self.name}\t{self.reduction}"


def canaries() -> Iterator[Canary]:
    """Yield all canaries in the order of the table. Raises OSError."""
    for line in (FOLDER / PIXELS).read_text().splitlines():
        name, reduction, _ = line.split("\t")
        yield Canary(name, int(reduction))


def pixels_of(canary: Canary) -> str:
    """Return a digest (16 hexadecimal digits) of the pixels that this machine decodes a canary to."""
    flags = REDUCED_COLOR[canary.reduction] | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = decode((FOLDER / canary.name).read_bytes(), flags)
    except BadImage:  # the decoder was built without this format
        return "0" * 16
    return hashlib.sha256(b"%d %d " % pixels.shape[:2] + pixels.tobytes()).hexdigest()[:16]


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
def checked_decoder() -> DecoderCheck:
    """Decode all canaries (about 5 ms, once per process). If they are missing, nothing differs."""
    try:
        reference = (FOLDER / PIXELS).read_text().splitlines()
        here = [f"{canary}\t{pixels_of(canary)}" for canary in canaries()]
    except OSError:
        return DecoderCheck("", "", ())
    differing = (one.partition("\t")[0] for one, other in zip(here, reference, strict=True) if one != other)
    return DecoderCheck(_digest(here), _digest(reference), tuple(dict.fromkeys(differing)))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def warn_of_decoder() -> None:
    """Warn with DecoderDiffers, once per process, if this machine's decoder differs from the reference."""
    if differing := checked_decoder().differing:
        _warn(f"decodes some images ({', '.join(differing)}) to different pixels than the reference")


def warn_of_other_decoder(digest: str) -> None:
    """Warn with DecoderDiffers if the digest of another machine's :class:`DecoderCheck` differs."""
    if digest != checked_decoder().digest:
        _warn("decodes the same images to different pixels than this run's previous decoder")


def _warn(what: str) -> None:
    warnings.warn(
        f"OpenCV {cv2.__version__} of this machine {what}, and mixing decoders may cost a model accuracy: "
        "install opencv-python-headless from the package index wherever the model is trained or evaluated",
        DecoderDiffers,
        stacklevel=4,  # the caller of the loader
    )
