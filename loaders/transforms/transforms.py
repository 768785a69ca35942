"""The transforms for training and evaluation, from a record to pixels, or to a crop that is still encoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.crop_ready import Crop
from shardprep.formats.images.decode import Encoded, cv2
from shardprep.formats.images.header import EXTREME_ASPECT
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import check_flags, check_int, is_number, is_sequence
from shardprep.loaders.transforms.contract import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Array,
    ArraySpec,
    Layout,
    PixelFormat,
    PixelType,
    TransformInput,
    are_numbers,
    check_choice,
)
from shardprep.loaders.transforms.decode import ORIENTATIONS, EncodedImage, Orientation, Reduction
from shardprep.loaders.transforms.geometry import (
    INVISIBLE_SHIFT,
    SMOOTH,
    SMOOTH_RANGE,
    TURNS,
    ShownPart,
    Span,
    Window,
    find_turn,
    resize_window,
    smooth,
)
from shardprep.loaders.transforms.targets import BoxUnits as BoxUnits, TargetOptions

Interpolation = Literal["auto", "linear", "area", "cubic"]
Rounding = Literal["torchvision", "tensorpack"]

REDUCTIONS: tuple[Reduction, ...] = (8, 4, 2)
MIN_RATIO = 0.85  # of a crop's shorter side to the reduced result's: a crop of aspect 4/3 has 0.866
MAX_SIDE = 4096  # of a result: no intermediate image then takes more than 805 MB
METHODS = {"linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC}


class Choice(NamedTuple):
    """A transform's choices for one image, made before anything is decoded.

    ``crop`` is the drawn rectangle, and ``part`` the rectangle to decode at 1 / ``reduction`` of its size;
    both are in pixels of the image. ``across`` and ``down`` place the result on the image's sides; ``method``
    is OpenCV's interpolation, or SMOOTH.
    """

    crop: Crop
    part: Crop
    reduction: Reduction
    across: Span
    down: Span
    method: int

    @property
    def shown(self) -> ShownPart:
        (left, right), (top, bottom) = self.across.bounds(), self.down.bounds()
        return ShownPart(left, top, right - left, bottom - top, self.across.is_mirrored)


def _normalize_options(options: Any) -> None:
    """Replace NumPy's numbers by Python's, and sequences and arrays by tuples: to compare, and for JSON."""
    for field in fields(options):
        object.__setattr__(options, field.name, _to_plain(getattr(options, field.name)))


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim):
        value = value.tolist()
    return tuple(map(_to_plain, value)) if is_sequence(value) else value


@dataclass(frozen=True, repr=False)
class ImageTransform(TargetOptions, ABC):
    """Base of transforms to one RGB image named ``image``; :class:`TrainTransform` describes the options."""

    size: int | tuple[int, int] = 224
    _: KW_ONLY
    layout: Layout = "HWC"
    dtype: PixelType = "uint8"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "auto"
    orientation: Orientation = "ignore"

    def __post_init__(self) -> None:
        _normalize_options(self)
        check_choice("interpolation", self.interpolation, ("auto", *METHODS))
        check_choice("orientation", self.orientation, ORIENTATIONS)
        self._check_targets()
        self.outputs  # noqa: B018 - raises for an impossible layout, dtype, mean or std

    def __repr__(self) -> str:
        """Return the call that makes this transform, without default options."""
        options = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.name != "size" and (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join([repr(self.size), *options])})"

    @cached_property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """The specs of the image, in ``layout`` and ``dtype``, and of the masks and boxes."""
        image = ArraySpec("image", self._format.shape(*self._sides), self._format.numpy_dtype)
        return (image, *self._target_specs(*self._sides))

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        """Return the image in a new array; with masks or boxes, a tuple of the arrays of :attr:`outputs`."""
        arrays = tuple(np.empty(spec.shape, spec.dtype) for spec in self.outputs)
        self.fill(record, rng, *arrays)
        return arrays if len(arrays) > 1 else arrays[0]

    def fill(self, record: TransformInput, rng: np.random.Generator, out: Array, *targets: Array) -> None:
        """Write :attr:`outputs` to C-contiguous arrays; ``targets`` follow the image."""
        image = self.open_image(record)
        self.render(record, image, self.choose(image, rng), rng, out, *targets)

    def shown(self, record: TransformInput, rng: np.random.Generator) -> ShownPart:
        """Return the part of the image that :meth:`fill` shows with the same random numbers."""
        return self.choose(self.open_image(record), rng).shown

    def open_image(self, record: TransformInput) -> EncodedImage:
        return EncodedImage(record, orientation=self.orientation)

    @abstractmethod
    def choose(self, image: EncodedImage, rng: np.random.Generator) -> Choice:
        """Draw the choices; an image is decoded only if its header does not have its size."""

    def render(
        self,
        record: TransformInput,
        image: EncodedImage,
        choice: Choice,
        rng: np.random.Generator,
        out: Array,
        *targets: Array,
    ) -> None:
        """Write all arrays of a choice; ``rng`` continues after :meth:`choose`."""
        self.draw(image, choice, rng, out)
        if targets:
            turn = find_turn(record.image, key=record.key) if self.orientation == "apply" else TURNS[0]
            self._write_targets(record, choice.across, choice.down, targets, turn=turn)

    @abstractmethod
    def draw(self, image: EncodedImage, choice: Choice, rng: np.random.Generator, out: Array) -> None:
        """Write the image of a choice; ``rng`` continues after :meth:`choose`."""

    @cached_property
    def _sides(self) -> tuple[int, int]:
        sides = self.size if isinstance(self.size, tuple | list) else (self.size, self.size)
        with suppress(UsageError, ValueError):  # ValueError if there are not two
            height, width = (check_int(side, "size", least=1, most=MAX_SIDE) for side in sides)
            return height, width
        raise UsageError(f"size must be 1 to {MAX_SIDE} pixels, or (height, width), not {self.size!r}")

    @cached_property
    def _format(self) -> PixelFormat:
        return PixelFormat(self.layout, self.dtype, self.mean, self.std)

    def _reduction(self, image: EncodedImage, source: tuple[int, int], result: tuple[int, int]) -> Reduction:
        """Return the reduction at which to decode an image of which ``source`` pixels become ``result``."""
        if self.interpolation != "auto" or not image.is_reducible:
            return 1
        across, down = (side / size for side, size in zip(source, result, strict=True))
        ratio, least = math.sqrt(across * down), min(across, down)
        return next((by for by in REDUCTIONS if ratio >= by and least >= MIN_RATIO * by), 1)


@dataclass(frozen=True, repr=False)
class TrainTransform(ImageTransform):
    """Random crop resized to ``size``, with optional flips and colour changes, for training.

    Deterministic in (seed, epoch, record). Thread-safe and picklable. The call raises BadImage, with the
    record's key, for bytes that do not decode.

    With ``interpolation="auto"``, crops of at least four times the result's pixels are averaged by area, and
    others resized bilinearly, as is a side that grows while the other is averaged. If both sides are large
    enough, an averaged crop begins and ends at multiples of 2, 4 or 8 pixels, and JPEGs are first decoded at
    that fraction of their size. On photographs, bilinear resizing matches antialiased resizing to 58 dB
    (median) when enlarging, 47 shrinking by up to 1.5 and 39 by up to 2, in 76 to 90 µs; area averaging to 53
    and 46, in 376 to 606 µs. Beyond 2 (4% of crops) it is 42, or 41 to 44 decoded at half size; bilinear 33.

    Args:
        size: Pixels per side of the result, 1 to 4096, or (height, width).
        masks: Names of columns with masks, cropped and resized (nearest) like the image; see
            :class:`.TargetOptions` for masks and boxes.
        boxes: Name of the column with boxes; None for none.
        box_labels: Name of the column with the labels of ``boxes``; None for none.
        max_boxes: Rows of the boxes array; further boxes are left out.
        min_box: Least share of a box's area, 0 to 1, that must remain in the crop.
        box_units: "fractions" of the result, or "pixels".
        layout: "HWC" ("NHWC", "channels_last") or "CHW" ("NCHW", "channels_first").
        dtype: "uint8", or normalised "float32", "float16" or "bfloat16": (value / 255 - ``mean``) / ``std``.
            bfloat16 is delivered as uint16 with the same bits, because NumPy lacks it.
        mean: Means of R, G, B in 0..1.
        std: Standard deviations of R, G, B in 0..1.
        interpolation: "linear", "area", "cubic", or "auto", which depends on the scale.
        orientation: "ignore" or "apply" EXIF orientation.
        scale: Range of the crop's share of the area.
        ratio: Range of the crop's width over its height, whatever the ``size``, as in torchvision: set it for
            a size far from square.
        flip: Whether to mirror half of the images.
        color_jitter: Changes of brightness, contrast and saturation; None for none. All colour changes are
            one pass.
        lighting: Standard deviation of AlexNet's colour noise, usually 0.1; None for none.

    Raises:
        UsageError: A value is out of range.
    """

    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    color_jitter: ColorJitter | None = None
    lighting: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not are_numbers(self.scale, 2) or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"scale must be shares of the area, 0 < low <= high <= 1, not {self.scale!r}")
        if not are_numbers(self.ratio, 2) or not 1 / MAX_SIDE <= self.ratio[0] <= self.ratio[1] <= MAX_SIDE:
            raise UsageError(f"ratio must be two aspects, 1/{MAX_SIDE} <= low <= high, not {self.ratio!r}")
        check_flags(flip=self.flip)
        if not isinstance(self.color_jitter, ColorJitter | None):
            raise UsageError(f"color_jitter must be a ColorJitter, or None, not {self.color_jitter!r}")
        if self.lighting is not None and (not is_number(self.lighting) or self.lighting < 0):
            raise UsageError(f"lighting must be a number of at least 0, or None, not {self.lighting!r}")

    def choose(self, image: EncodedImage, rng: np.random.Generator) -> Choice:
        coin, *draws = rng.random(1 + CROP_DRAWS).tolist()
        crop = random_crop(*image.size, scale=self.scale, ratio=self.ratio, draws=draws)
        return self.choice_of(image, crop, self.flip and coin < 0.5)

    def choice_of(self, image: EncodedImage, crop: Crop, is_mirrored: bool) -> Choice:
        (width, height), (rows, columns) = image.size, self._sides
        reduction = self._reduction(image, crop[2:], (columns, rows))
        part = crop.aligned(reduction)
        auto = cv2.INTER_AREA if crop.area >= 4 * rows * columns else cv2.INTER_LINEAR
        return Choice(
            crop,
            part,
            reduction,
            Span(width, part.x, part.width, columns, columns, is_mirrored=is_mirrored),
            Span(height, part.y, part.height, rows, rows),
            METHODS.get(self.interpolation, auto),
        )

    def draw(self, image: EncodedImage, choice: Choice, rng: np.random.Generator, out: Array) -> None:
        pixels: Array = image.pixels(choice.part, reduction=choice.reduction)
        method = choice.method
        (rows, columns), (high, wide) = self._sides, pixels.shape[:2]
        if method == cv2.INTER_AREA and (wide - columns) * (high - rows) < 0:
            # if one side grows, OpenCV reads only two pixels of the other, however many become one
            pixels = cv2.resize(pixels, (min(wide, columns), min(high, rows)), interpolation=method)
            method = cv2.INTER_LINEAR
        plain = out if self._format.is_plain else None
        pixels = cv2.resize(pixels, (columns, rows), dst=plain, interpolation=method)
        if choice.across.is_mirrored:
            cv2.flip(pixels, 1, dst=pixels)
        if self.color_jitter or self.lighting:
            colours = np.eye(3, 4)  # the map of R, G, B
            if self.color_jitter:
                colours = self.color_jitter.matrix(cv2.mean(pixels), rng.random(3).tolist())
            if self.lighting:
                weights = self.lighting * rng.standard_normal(3)
                colours[:, 3] += 255 * EIGENVECTORS @ (EIGENVALUES * weights)
            pixels = cv2.transform(pixels, colours)
        self._format.write(pixels, out)


@dataclass(frozen=True, repr=False)
class EvalTransform(ImageTransform):
    """Shorter side resized to ``resize``, then the centre crop of ``size``, for evaluation.

    Nothing is random. Thread-safe and picklable. The call raises BadImage, with the record's key, for bytes
    that do not decode. If one side of an image is more than 16 times the other (EXTREME_ASPECT), only the
    part that the centre needs is resized: its pixels may differ from the whole image's by rounding or,
    where ``"area"`` enlarges, by a shift of one pixel.

    With ``interpolation="auto"``, enlarging is bilinear, shrinking by 1.2 to 3 is bilinear after a smoothing
    filter, and other shrinking averages areas. Photographs of 500 pixels then match antialiased bilinear
    resizing to 49 dB (median), in 0.7 of the time of ``"area"``, which reaches 47; ``"linear"`` reaches 41.
    JPEGs of twice the size or more are first decoded at a fraction of it.

    Args:
        size: Pixels per side of the result, or (height, width).
        masks, boxes, box_labels, max_boxes, min_box, box_units: As for :class:`TrainTransform`.
        layout, dtype, mean, std, interpolation, orientation: As for :class:`TrainTransform`.
        resize: Pixels of the shorter side, at least the longer side of ``size``.
        rounding: "torchvision" rounds the longer side down and the crop's offset to the nearest, halves to
            even; "tensorpack" rounds the longer side to the nearest and the offset down.

    Raises:
        UsageError: A value is out of range.
    """

    _: KW_ONLY
    resize: int = 256
    rounding: Rounding = "torchvision"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rounding", self.rounding, get_args(Rounding))
        check_int(self.resize, "resize, at least the size,", least=max(self._sides), most=MAX_SIDE)

    def choose(self, image: EncodedImage, rng: np.random.Generator) -> Choice:
        smallest = min(image.size)
        reduction = self._reduction(image, (smallest, smallest), (self.resize, self.resize))
        wide, high = (
            self._centre_span(side, size, smallest)
            for side, size in zip(image.size, self._sides[::-1], strict=True)
        )
        method = METHODS.get(self.interpolation, self._auto_method(-(-smallest // reduction)))
        across, down = self._windows(wide, high, reduction, method)
        part = Crop(across.start, down.start, across.stop - across.start, down.stop - down.start)
        part = part.scaled(reduction, *image.size)
        return Choice(part, part, reduction, wide, high, method)

    def draw(self, image: EncodedImage, choice: Choice, rng: np.random.Generator, out: Array) -> None:
        _, part, reduction, wide, high, method = choice
        across, down = self._windows(wide, high, reduction, method)
        left, top = wide.first - across.at, high.first - down.at
        fx, fy = (span.resized * reduction / span.length for span in (wide, high))
        pixels: Array = image.pixels(part, reduction=reduction)
        if method == SMOOTH:
            pixels, method = smooth(pixels, 1 / fx, 1 / fy, across.shift), cv2.INTER_LINEAR
        pixels = cv2.resize(pixels, None, fx=fx, fy=fy, interpolation=method)
        rows, columns = self._sides
        self._format.write(pixels[top : top + rows, left : left + columns], out)

    def _centre_span(self, side: int, size: int, shorter: int) -> Span:
        if self.rounding == "tensorpack":
            resized = int(self.resize / shorter * side + 0.5)
            return Span(side, 0, side, resized, size, (resized - size) // 2)
        resized = self.resize * side // shorter
        return Span(side, 0, side, resized, size, round((resized - size) / 2))

    def _windows(self, wide: Span, high: Span, reduction: Reduction, method: int) -> tuple[Window, Window]:
        across, down = (
            resize_window(
                span.length,
                span.resized,
                first=span.first,
                size=span.size,
                most=EXTREME_ASPECT * self.resize,
                reduction=reduction,
                is_whole=method not in (SMOOTH, cv2.INTER_AREA) or span.resized * reduction > span.length,
                slack=slack if method == SMOOTH else 0.0,
            )
            for span, slack in ((wide, 0.5), (high, INVISIBLE_SHIFT))  # the smoothing shifts across
        )
        return across, down

    def _auto_method(self, shorter: int) -> int:
        if shorter <= self.resize:
            return cv2.INTER_LINEAR
        return SMOOTH if SMOOTH_RANGE[0] <= shorter / self.resize <= SMOOTH_RANGE[1] else cv2.INTER_AREA


Matrix = npt.NDArray[np.float64]

CROP_TRIES = 10  # as torchvision's RandomResizedCrop
CROP_DRAWS = 2 + 2 * CROP_TRIES
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, of R, G, B

# The principal components of ImageNet's RGB values in 0..1 (Krizhevsky et al. 2012, with the numbers
# of fb.resnet.torch): one eigenvector per column.
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


_NO_COLOURS = np.random.default_rng(0)  # nothing is drawn from it


@dataclass(frozen=True)
class Cut:
    """The crops of a :class:`TrainTransform`, still encoded.

    A batch begins with a dict: ``jpeg``, a list of encoded images; ``crop``, int32 [B, 4], each crop's x, y,
    width and height in its image, in pixels; and ``mirrored``, bool [B]. From a crop-ready image only the
    blocks that the crop needs are taken, as a baseline JPEG, without decoding. Other images are whole, in
    their own format. With the same random numbers, crop and mirroring are the transform's.

    Thread-safe and picklable.

    Args:
        transform: Chooses the crops. It must not change colours, have masks or boxes, or apply EXIF
            orientation: that must happen after decoding.

    Raises:
        UsageError: It is not such a transform.
    """

    transform: TrainTransform

    def __post_init__(self) -> None:
        base = self.transform
        if not isinstance(base, TrainTransform):
            raise UsageError(f"Cut takes a TrainTransform, not {base!r}")
        if base.color_jitter or base.lighting or len(base.outputs) > 1 or base.orientation == "apply":
            raise UsageError(
                "Cut takes a TrainTransform that only crops and mirrors: leave out color_jitter, lighting, masks, "
                f"boxes and orientation='apply', and do that after decoding; not {base!r}"
            )

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        """Return the JPEG, the crop's place in it, and whether it is mirrored."""
        image = self.transform.open_image(record)
        choice = self.transform.choose(image, rng)
        jpeg, x, y = image.cut(choice.part, reduction=choice.reduction)
        crop = np.array([choice.crop.x - x, choice.crop.y - y, *choice.crop[2:]], np.int32)
        return {"jpeg": jpeg, "crop": crop, "mirrored": np.bool_(choice.across.is_mirrored)}

    def shown(self, record: TransformInput, rng: np.random.Generator) -> ShownPart:
        """Return the part of the image that the crop shows."""
        return self.transform.shown(record, rng)

    def finish(
        self, jpeg: Encoded, crop: npt.ArrayLike, mirrored: bool | np.bool_, *, key: str | None = None
    ) -> Array:
        """Decode a crop on the CPU, bit for bit as the transform does.

        Args:
            jpeg: An encoded image of the batch.
            crop: Its row of ``crop``.
            mirrored: Its element of ``mirrored``.
            key: Key to name in errors.

        Returns:
            The transform's image in a new array.

        Raises:
            BadImage: The bytes do not decode.
        """
        (spec,) = self.transform.outputs
        out = np.empty(spec.shape, spec.dtype)
        x, y, width, height = (int(side) for side in np.asarray(crop).tolist())
        image = EncodedImage(jpeg, key=key)
        choice = self.transform.choice_of(image, Crop(x, y, width, height), bool(mirrored))
        self.transform.draw(image, choice, _NO_COLOURS, out)
        return out


def random_crop(
    width: int, height: int, *, scale: tuple[float, float], ratio: tuple[float, float], draws: Sequence[float]
) -> Crop:
    """Return a crop with a share of the area in ``scale``, an aspect in ``ratio`` (log-uniform), anywhere.

    ``draws`` are CROP_DRAWS uniform numbers in [0, 1). If CROP_TRIES rectangles do not fit into the image,
    the result is the largest centred one with the aspect nearest to ``ratio``, as in torchvision. Never
    empty, for any image.
    """
    log_ratio = math.log(ratio[0])
    log_span = math.log(ratio[1]) - log_ratio
    for share, aspect_draw in zip(draws[2::2], draws[3::2], strict=True):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * share)
        aspect = math.exp(log_ratio + log_span * aspect_draw)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Crop(int(draws[0] * (width - w + 1)), int(draws[1] * (height - h + 1)), w, h)
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return Crop((width - w) // 2, (height - h) // 2, w, h)


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Random changes of brightness, then contrast, then saturation.

    Each factor is drawn from [max(0, 1 - x), 1 + x] for its strength x. The three are one affine map of R, G
    and B: values are clipped once, at the end, where other libraries clip after each step.

    Args:
        brightness: Strength of the change of brightness.
        contrast: Strength of the change of contrast.
        saturation: Strength of the change of saturation.

    Raises:
        UsageError: A strength is negative or not finite.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4

    def __post_init__(self) -> None:
        _normalize_options(self)
        strengths = (self.brightness, self.contrast, self.saturation)
        if not are_numbers(strengths, 3) or min(strengths) < 0:
            raise UsageError(f"the strengths of a colour jitter must be at least 0 and finite: {self}")

    def matrix(self, mean: npt.ArrayLike, draws: Sequence[float]) -> Matrix:
        """Return the 3 x 4 map for an image with this mean colour; ``draws`` are three numbers in [0, 1)."""
        strengths = (self.brightness, self.contrast, self.saturation)
        ranges = ((max(0.0, 1 - strength), 1 + strength) for strength in strengths)
        factors = (low + (high - low) * draw for (low, high), draw in zip(ranges, draws, strict=True))
        brightness, contrast, saturation = factors
        gray = brightness * float(LUMA @ np.asarray(mean)[:3])
        colours = saturation * np.eye(3) + (1 - saturation) * LUMA  # rows sum to 1: grays stay
        return np.hstack([brightness * contrast * colours, np.full((3, 1), (1 - contrast) * gray)])
