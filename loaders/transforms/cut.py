"""Crops that are decoded elsewhere, such as on a GPU: small JPEGs, and the place of the crop in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.crop_ready import Crop
from shardprep.formats.images.decode import Encoded
from shardprep.loaders.transforms.contract import Array, TransformInput
from shardprep.loaders.transforms.decode import EncodedImage
from shardprep.loaders.transforms.geometry import ShownPart
from shardprep.loaders.transforms.transforms import TrainTransform

_NO_COLOURS = np.random.default_rng(0)  # nothing is drawn from it


@dataclass(frozen=True)
class Cut:
    """The crops of a :class:`TrainTransform`, not decoded.

    A batch begins with a dict: ``jpeg``, a list of encoded images; ``crop``, int32 [B, 4], the x, y, width
    and height of the crop in each, in pixels; and ``mirrored``, bool [B]. Of a crop-ready image the JPEG is
    cut out of it without decoding: a baseline JPEG of the blocks that the crop needs. Other images are whole,
    in their own format. Crop and mirroring are those of the transform with the same random numbers.

    Thread-safe and picklable.

    Args:
        transform: Chooses the crops. It must not change colours, or have masks or boxes, or apply EXIF
            orientation: that would have to happen after decoding.

    Raises:
        UsageError: The transform is another one.
    """

    transform: TrainTransform

    def __post_init__(self) -> None:
        given = self.transform
        if not isinstance(given, TrainTransform):
            raise UsageError(f"Cut takes a TrainTransform, not {given!r}")
        if given.color_jitter or given.lighting or len(given.outputs) > 1 or given.orientation == "apply":
            raise UsageError(
                "Cut takes a TrainTransform of crops and mirroring alone: leave out color_jitter, lighting, masks, "
                f"boxes and orientation='apply', and do that after decoding; not {given!r}"
            )

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        """Return the JPEG, the place of the crop in it, and whether it is mirrored."""
        image = self.transform.encoded(record)
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
        """Decode a crop on the CPU, bit for bit as the transform does with the record.

        Args:
            jpeg: The encoded image of a batch.
            crop: Its row of ``crop``.
            mirrored: Its element of ``mirrored``.
            key: Key to name in errors.

        Returns:
            The image in a new array, as the transform returns it.

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
