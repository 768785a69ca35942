"""Crops to decode elsewhere, such as on a GPU: small JPEGs, and the crop's place in each."""

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
        given = self.transform
        if not isinstance(given, TrainTransform):
            raise UsageError(f"Cut takes a TrainTransform, not {given!r}")
        if given.color_jitter or given.lighting or len(given.outputs) > 1 or given.orientation == "apply":
            raise UsageError(
                "Cut takes a TrainTransform that only crops and mirrors: leave out color_jitter, lighting, masks, "
                f"boxes and orientation='apply', and do that after decoding; not {given!r}"
            )

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        """Return the JPEG, the crop's place in it, and whether it is mirrored."""
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
