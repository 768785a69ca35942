"""Decoding of images to RGB pixels with OpenCV, whole or only a crop."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.images.crop_ready import AHEAD, Crop, read_grid
from shardprep.formats.images.decode import REDUCED, Encoded, cv2, decode, jpeg_decoder
from shardprep.formats.images.header import MAX_PIXELS, jpeg_orientation, jpeg_size
from shardprep.loaders.transforms.contract import TransformInput, check_choice

Orientation = Literal["ignore", "apply"]
ORIENTATIONS = ("ignore", "apply")
Reduction = Literal[1, 2, 4, 8]
Pixels = npt.NDArray[np.uint8]


class _DecodingTime(threading.local):
    seconds = 0.0


_time = _DecodingTime()


def decoding_seconds() -> float:
    """Return the seconds that this thread has spent decoding so far."""
    return _time.seconds


def decode_rgb(
    image: Encoded | TransformInput,
    *,
    crop: tuple[int, int, int, int] | None = None,
    orientation: Orientation = "ignore",
    key: str | None = None,
) -> Pixels:
    """Decode an image to RGB; gray, CMYK and transparent images are converted.

    Thread-safe; releases the GIL while decoding. An image that crashes OpenCV ends the process: a
    :class:`.Loader` with workers survives that and names the record, one with ``workers=0`` does not.

    Args:
        image: The encoded bytes, or the record that a transform gets. From a crop-ready record, but not from
            its bytes, little more than ``crop`` is decoded. An animated PNG gives its still image.
        crop: (x, y, width, height) in pixels of the rectangle to return; None is the whole image.
        orientation: "ignore" EXIF orientation, as ILSVRC12's boxes and most published models do, or "apply"
            it before the crop.
        key: Key to name in errors; None is the record's own.

    Returns:
        A writable array, uint8 [height, width, 3].

    Raises:
        BadImage: The bytes do not decode, or have more than MAX_PIXELS pixels.
        UsageError: The crop is not a part of the image, or the record was read without its image.
    """
    check_choice("orientation", orientation, ORIENTATIONS)
    try:
        box = None if crop is None else Crop(*map(operator.index, crop))
    except TypeError:
        raise UsageError(f"a crop must be (x, y, width, height) in whole pixels, not {crop!r}") from None
    source = EncodedImage(image, orientation=orientation, key=key)
    if box is None:
        return source.all_pixels()
    width, height = source.size
    if min(box) < 0 or 0 in box[2:] or box.x + box.width > width or box.y + box.height > height:
        raise UsageError(f"the crop {tuple(box)} is not within {width}x{height} pixels", key=source.key)
    return source.pixels(box)


class EncodedImage:
    """An encoded image of known size, from which a transform decodes only what it needs.

    The arguments are as for :func:`decode_rgb`. Not thread-safe; valid as long as the bytes are.
    """

    def __init__(
        self, image: Encoded | TransformInput, *, orientation: Orientation = "ignore", key: str | None = None
    ) -> None:
        is_bytes = isinstance(image, bytes | bytearray | memoryview)
        if not is_bytes and not hasattr(image, "image"):
            raise UsageError(f"give an image's bytes (Path(path).read_bytes()) or a record, not {image!r}")
        self._image: Encoded = image if is_bytes else image.image  # type: ignore[union-attr,assignment]
        self.key = key if is_bytes or key is not None else image.key  # type: ignore[union-attr]
        if not is_bytes and not self._image:
            raise UsageError(
                "the record has no image to decode: name 'image' in columns=, too, or, if the dataset has no "
                "images, give a transform that reads its columns",
                key=self.key,
            )
        self._flags = cv2.IMREAD_COLOR_RGB
        if orientation == "ignore":
            self._flags |= cv2.IMREAD_IGNORE_ORIENTATION
        is_upright = orientation == "ignore" or jpeg_orientation(self._image) == 1
        is_ready = is_upright and getattr(image, "crop_ready", False)
        self._grid = read_grid(self._image) if is_ready else None
        self._decoded: Pixels | None = None
        self._regions: list[tuple[Crop, Reduction, tuple[Pixels, int, int]]] = []
        if self._grid is None:
            size = jpeg_size(self._image) if is_upright else None
        else:  # reading the header takes 6 us
            size = self._grid.width, self._grid.height
        self._is_fast = size is not None and size[0] * size[1] <= MAX_PIXELS
        self.size = size or self.all_pixels().shape[1::-1]
        """Width and height of the decoded image in pixels."""

    @property
    def is_reducible(self) -> bool:
        """Whether decoding at a fraction of the size saves time; not once the whole image is decoded."""
        return self._decoded is None

    def all_pixels(self, *, reduction: Reduction = 1) -> Pixels:
        """Return the whole image at 1 / ``reduction`` of its width and height."""
        if reduction != 1:
            return self._decode(self._image, reduction)
        if self._decoded is None:
            self._decoded = self._decode(self._image)
        return self._decoded

    def decode_together(self, crops: Iterable[Crop], *, reduction: Reduction = 1) -> None:
        """Decode these crops, joined into few rectangles, for later calls of :meth:`pixels`."""
        parts = [Crop(0, 0, *self.size)] if self._grid is None else _merge_crops(crops)
        self._regions += [(part, reduction, self._decode_around(part, reduction)) for part in parts]

    def pixels(self, crop: Crop, *, reduction: Reduction = 1) -> Pixels:
        """Return the pixels of a crop at 1 / ``reduction`` of its width and height.

        ``crop`` must begin at multiples of ``reduction``; its size is rounded up to them. If the image is
        decoded already, ``reduction`` must be 1.
        """
        x, y, width, height = (-(-side // reduction) for side in crop)
        pixels, left, top = self._decode_around(crop, reduction)
        x, y = x - left // reduction, y - top // reduction
        part = pixels[y : y + height, x : x + width]
        if part.shape[:2] != (height, width):
            raise BadImage("decodes to fewer pixels than its header says", key=self.key)
        return part

    def cut(self, crop: Crop, *, reduction: Reduction = 1) -> tuple[bytes, int, int]:
        """Return an encoded part of a crop-ready image, and its x and y; any other image whole, with 0 and 0.

        The part suffices for the crop decoded at 1 / ``reduction``.
        """
        cut = self._grid.cut(self._image, crop, reduction=reduction) if self._grid else None
        if cut is None:
            return bytes(self._image), 0, 0
        return cut.image[: -len(AHEAD)].tobytes(), cut.x, cut.y

    def _decode_around(self, crop: Crop, reduction: Reduction) -> tuple[Pixels, int, int]:
        """Return pixels that contain the crop, and the x and y in the image where they begin."""
        for part, fraction, decoded in self._regions:
            if fraction == reduction and part.contains(crop):
                return decoded
        cut = self._grid.cut(self._image, crop, reduction=reduction) if self._grid else None
        if cut is not None:
            return self._decode(cut.image.data, reduction), cut.x, cut.y
        return self.all_pixels(reduction=reduction), 0, 0

    def _decode(self, image: Encoded, reduction: Reduction = 1) -> Pixels:
        began = perf_counter()
        try:
            if self._is_fast and reduction == 1 and (decoder := jpeg_decoder()):
                with suppress(ValueError):  # refused images are left to OpenCV
                    return decoder(image)
            return decode(image, self._flags | REDUCED[reduction], key=self.key)
        finally:
            _time.seconds += perf_counter() - began


def _merge_crops(crops: Iterable[Crop]) -> list[Crop]:
    """Return rectangles that contain the crops, joined if that adds no pixels."""
    parts: list[Crop] = []
    for crop in sorted(crops, key=lambda crop: crop.area, reverse=True):
        for number, part in enumerate(parts):
            joined = part.union(crop)
            if joined.area <= part.area + crop.area:
                parts[number] = joined
                break
        else:
            parts.append(crop)
    return parts
