"""A wrapper for transforms of albumentations."""

from __future__ import annotations

import os
import random
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import MissingExtra
from shardprep.loaders.transforms.contract import (
    ArraySpec,
    LibraryVersion,
    TransformInput,
    check_wrapper,
    in_arrays,
)
from shardprep.loaders.transforms.decode import Orientation, decode_rgb
from shardprep.loaders.transforms.transforms import seeded_globally

# Otherwise every worker asks the package index for a newer version on import.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

try:
    import albumentations
except ModuleNotFoundError as error:
    raise MissingExtra.of(
        "shardprep.loaders.transforms.albumentations", "albumentations", "albumentations"
    ) from error


@dataclass(frozen=True)
class Albumentations:
    """A transform that decodes a record's image and calls ``transform``, such as ``A.Compose([...])``.

    ``transform`` gets ``image``, uint8 [height, width, 3] in RGB, and no other target. The result is the
    ``image`` that it returns, as an array that shares the tensor's memory after ``ToTensorV2``; the label is
    delivered beside it. ``orientation`` is as for :func:`.decode_rgb`. ``outputs`` may declare the results.

    All randomness comes from the record's generator, which replaces the transform's own, so that an epoch
    repeats for any number of workers; the global generators of Python, NumPy and PyTorch are seeded from it
    during the call. Picklable if ``transform`` is. Not thread-safe: use processes. Raises UsageError for
    wrong options; the call raises BadImage as :func:`.decode_rgb` does, and the errors of ``transform``.
    """

    transform: Any
    _: KW_ONLY
    orientation: Orientation = "ignore"
    outputs: tuple[ArraySpec, ...] | None = None

    def __post_init__(self) -> None:
        check_wrapper(self.transform, self.orientation, self.outputs)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        """Return the transformed image as an array."""
        pixels = decode_rgb(record.image, orientation=self.orientation, key=record.key)
        # `set_random_seed` would give all transforms of a Compose the same draws.
        self.transform.set_random_state(rng, random.Random(int(rng.integers(1 << 63))))  # noqa: S311
        with seeded_globally(rng):
            return in_arrays(self.transform(image=pixels)["image"])

    @property
    def identity(self) -> tuple[object, ...]:
        described = albumentations.to_dict(self.transform)
        described["__version__"] = LibraryVersion(described["__version__"])
        return described, self.orientation, self.outputs
