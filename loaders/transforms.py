"""From a record to the arrays that are trained on: what a transform promises, and the usual two."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from ..formats.opencv import cv2
from .augment import CROP_DRAWS, ColorJitter, lighting_offset, random_crop
from .decoding import Encoded, Orientation, Pixels, decode_rgb
from .pixels import IMAGENET_MEAN, IMAGENET_STD, Layout, PixelFormat, PixelType

Array = npt.NDArray[Any]
Interpolation = Literal["auto", "linear", "area", "cubic"]

METHODS = {"linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC}


class TransformInput(Protocol):
    """The record that a transform is given; ``image`` is good only while it runs."""

    @property
    def key(self) -> str: ...
    @property
    def label(self) -> int: ...
    @property
    def image(self) -> Encoded: ...


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array that a transform makes of every record: its name, shape and numpy dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Transform(Protocol):
    """Any picklable callable of a record and its random generator; a plain function will do.

    All its randomness must come from ``rng``, which depends on (seed, epoch, record) only and is
    good only during the call: then batches are the same for any number of workers. It may have

    - ``outputs``, the specs of the arrays it returns, in order. Without, or None, its results may
      be of any size and are delivered as a list.
    - ``fill(record, rng, *arrays)``, which writes the outputs into rows of a batch, C-contiguous
      and of arbitrary content, and spares the copy.
    """

    def __call__(self, record: TransformInput, rng: np.random.Generator, /) -> Any: ...


def outputs_of(transform: Transform) -> tuple[ArraySpec, ...] | None:
    """The arrays that the transform declares; None where results may be of any size. Raises UsageError."""
    if isinstance(transform, type) or not callable(transform):
        raise UsageError(
            f"transform must be a callable of a record, such as TrainTransform(224), not {transform!r}"
        )
    outputs: tuple[ArraySpec, ...] | None = getattr(transform, "outputs", None)
    if not (
        outputs is None or (isinstance(outputs, tuple) and all(isinstance(s, ArraySpec) for s in outputs))
    ):
        raise UsageError(f"a transform's outputs must be a tuple of ArraySpec, not {outputs!r}")
    return outputs


def fill_rows(
    transform: Transform, record: TransformInput, rng: np.random.Generator, rows: tuple[Array, ...]
) -> None:
    """Have the transform's outputs in ``rows``, one array for each of its specs.

    Raises UsageError where the transform returns other arrays than it declares.
    """
    fill = getattr(transform, "fill", None)
    if fill is not None:
        fill(record, rng, *rows)
        return
    made = transform(record, rng)
    arrays = made if isinstance(made, tuple) else (made,)
    is_as_declared = len(arrays) == len(rows) and all(
        np.shape(array) == row.shape and np.asarray(array).dtype == row.dtype
        for array, row in zip(arrays, rows, strict=True)
    )
    if not is_as_declared:
        returned = ", ".join(f"{np.asarray(a).dtype}{list(np.shape(a))}" for a in arrays)
        declared = ", ".join(f"{row.dtype}{list(row.shape)}" for row in rows)
        raise UsageError(f"the transform declares {declared} and returns {returned}", key=record.key)
    for array, row in zip(arrays, rows, strict=True):
        row[...] = array


@dataclass(frozen=True)
class ImageTransform(ABC):
    """One square RGB image of each record, ``size`` pixels wide and high, named ``image``.

    Picklable and thread-safe. ``mean`` and ``std`` (of R, G, B in 0..1) count for float32 only.
    EXIF orientation is ignored, unless ``orientation="apply"``. Raises BadImage, with the
    record's key, for bytes that do not decode.
    """

    size: int = 224
    _: KW_ONLY
    layout: Layout = "HWC"
    dtype: PixelType = "uint8"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "auto"
    orientation: Orientation = "ignore"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size must be at least 1 pixel, not {self.size}")
        if self.interpolation not in ("auto", *METHODS):
            names = ", ".join(METHODS)
            raise UsageError(f"interpolation must be auto, {names}, not {self.interpolation!r}")
        if self.orientation not in ("ignore", "apply"):
            raise UsageError(f"orientation must be 'ignore' or 'apply', not {self.orientation!r}")
        self.outputs  # noqa: B018 - an impossible layout, dtype, mean or std is an error here

    @cached_property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """One image, in the layout and dtype asked for."""
        return (ArraySpec("image", self._format.shape(self.size, self.size), self.dtype),)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Array:
        """The image in a new array."""
        (spec,) = self.outputs
        out = np.empty(spec.shape, spec.dtype)
        self.fill(record, rng, out)
        return out

    @abstractmethod
    def fill(self, record: TransformInput, rng: np.random.Generator, out: Array) -> None:
        """The image in ``out``, C-contiguous and as :attr:`outputs` says."""

    @cached_property
    def _format(self) -> PixelFormat:
        return PixelFormat(self.layout, self.dtype, self.mean, self.std)

    def _decode(self, record: TransformInput) -> Pixels:
        return decode_rgb(record.image, orientation=self.orientation, key=record.key)


@dataclass(frozen=True)
class TrainTransform(ImageTransform):
    """A random crop resized to ``size``, flipped half of the time; colours changed on request.

    ``scale`` is the crop's share of the area, ``ratio`` its width by height; ``lighting`` is the
    standard deviation of AlexNet's colour noise, usually 0.1. All changes of colour are one pass.

    ``interpolation="auto"`` is area averaging for crops of at least four times the pixels of the
    result, else bilinear. Against antialiased bilinear resizing of photographs, bilinear reaches
    58 dB (median) enlarging, 47 shrinking by up to 1.5 and 39 by up to 2, for 76 to 90 µs; area
    averaging 53 and 46 for 376 to 606 µs; beyond 2 it is 42 against 33 dB, in 4 % of the crops.
    """

    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    color_jitter: ColorJitter | None = None
    lighting: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"scale must be two shares of the area, 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"ratio must be two aspects, 0 < low <= high, not {self.ratio}")

    def fill(self, record: TransformInput, rng: np.random.Generator, out: Array) -> None:
        pixels = self._decode(record)
        coin, *draws = rng.random(1 + CROP_DRAWS).tolist()
        height, width = pixels.shape[:2]
        x, y, w, h = random_crop(width, height, scale=self.scale, ratio=self.ratio, draws=draws)
        image = cv2.resize(
            pixels[y : y + h, x : x + w],
            (self.size, self.size),
            dst=out if self._format.is_plain else None,
            interpolation=self._method(w * h),
        )
        if self.flip and coin < 0.5:
            cv2.flip(image, 1, dst=image)
        if self.color_jitter or self.lighting:
            image = cv2.transform(image, self._colours(image, rng))
        self._format.write(image, out)

    def _method(self, pixels: int) -> int:
        if self.interpolation == "auto":
            return cv2.INTER_AREA if pixels >= 4 * self.size**2 else cv2.INTER_LINEAR
        return METHODS[self.interpolation]

    def _colours(self, image: Array, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """The 3 x 4 map of a pixel's R, G, B that this record's colours go through."""
        colours = np.eye(3, 4)
        if self.color_jitter:
            colours = self.color_jitter.matrix(cv2.mean(image), rng.random(3).tolist())
        if self.lighting:
            colours[:, 3] += lighting_offset(self.lighting * rng.standard_normal(3))
        return colours


@dataclass(frozen=True)
class EvalTransform(ImageTransform):
    """The shorter side resized to ``resize``, then the centre; nothing is random.

    The longer side is rounded down and the centre's place to even, as torchvision does.

    ``interpolation="auto"`` is area averaging when shrinking, else bilinear. For photographs of 500
    pixels it comes to 53 dB (median) of antialiased bilinear resizing, in 0.9 ms; bilinear to 47
    dB in 0.15 ms, so that ``"linear"`` makes an epoch of validation nearly twice as fast.
    """

    _: KW_ONLY
    resize: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize < self.size:
            raise UsageError(f"resize ({self.resize}) must not be smaller than size ({self.size})")

    def fill(self, record: TransformInput, rng: np.random.Generator, out: Array) -> None:
        pixels = self._decode(record)
        height, width = pixels.shape[:2]
        shorter = min(width, height)
        w, h = (self.resize * side // shorter for side in (width, height))
        image = cv2.resize(pixels, (w, h), interpolation=self._method(shorter))
        x, y = round((w - self.size) / 2), round((h - self.size) / 2)
        self._format.write(image[y : y + self.size, x : x + self.size], out)

    def _method(self, shorter: int) -> int:
        if self.interpolation == "auto":
            return cv2.INTER_AREA if shorter > self.resize else cv2.INTER_LINEAR
        return METHODS[self.interpolation]
