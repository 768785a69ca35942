"""A wrapper for transforms of albumentations."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import MissingExtra, UsageError
from shardprep.loaders.transforms.contract import LibraryVersion, to_arrays
from shardprep.loaders.transforms.decode import Pixels
from shardprep.loaders.transforms.wrapper import WrappedTransform, seed_global_generators

# Otherwise every worker asks the package index for a newer version on import.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

try:
    import albumentations
except ModuleNotFoundError as error:
    raise MissingExtra.of(
        "shardprep.loaders.transforms.albumentations", "albumentations", "albumentations"
    ) from error


@dataclass(frozen=True)
class Albumentations(WrappedTransform):
    """A transform that decodes a record's image and calls ``transform``, such as ``A.Compose([...])``.

    The result is the ``image`` that ``transform`` returns, as an array that shares the tensor's memory after
    ``ToTensorV2``; the label is delivered beside it.

    All randomness comes from the record's generator, which replaces the transform's own, so that an epoch
    repeats for any number of workers; the global generators of Python, NumPy and PyTorch are seeded from it
    during the call. Picklable if ``transform`` is. Not thread-safe: use processes. The call raises BadImage
    as :func:`.decode_rgb` does, and the errors of ``transform``.

    Args:
        transform: Gets ``image``, uint8 [height, width, 3] in RGB, and no other target.
        crop: A :class:`.TrainTransform` or :class:`.EvalTransform`, whose uint8 image ``transform`` gets in
            place of the whole one: faster than a crop by albumentations, most of all from crop-ready shards.
        orientation: As for :func:`.decode_rgb`; with ``crop``, its own option.
        outputs: The specs of the results, which may be declared.

    Raises:
        UsageError: An option is invalid, ``transform`` is for boxes or keypoints, or ``crop`` makes anything
            but one uint8 image in HWC.
    """

    def __post_init__(self) -> None:
        if getattr(self.transform, "processors", None):
            raise UsageError("transform gets no boxes or keypoints: call it in a function of (record, rng)")
        super().__post_init__()

    def applied(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        # `set_random_seed` would give all transforms of a Compose the same draws.
        self.transform.set_random_state(rng, random.Random(int(rng.integers(1 << 63))))  # noqa: S311
        with seed_global_generators(rng):
            return to_arrays(self.transform(image=pixels)["image"])

    @property
    def identity(self) -> tuple[object, ...]:
        described = albumentations.to_dict(self.transform)
        described["__version__"] = LibraryVersion(described["__version__"])
        return described, *self.options
