"""A wrapper for transforms of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from shardprep.formats.errors import MissingExtra
from shardprep.loaders.transforms.contract import (
    ArraySpec,
    LibraryVersion,
    TransformInput,
    check_choice,
    check_wrapper,
    in_arrays,
)
from shardprep.loaders.transforms.decode import Orientation, decode_rgb
from shardprep.loaders.transforms.transforms import seeded_globally

try:
    import torch
    import torchvision
    from PIL import Image
    from torchvision import tv_tensors
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.transforms.torchvision", "torchvision", "torchvision") from error


@dataclass(frozen=True)
class Torchvision:
    """A transform that decodes a record's image and calls ``transform``, such as torchvision's v2.Compose.

    ``transform`` gets a ``tv_tensors.Image``, uint8 [3, height, width] in RGB, or, with ``image="pil"``, a
    PIL image. Its results become arrays: tensors over the same memory (bfloat16 as uint16 with the same
    bits), PIL images as uint8 [height, width, 3]; see :class:`.Transform` for tuples and dicts. The label is
    delivered beside them, and is not given to ``transform``. ``orientation`` is as for :func:`.decode_rgb`.
    ``outputs`` may declare the results.

    The global random generators of PyTorch (for CPUs), NumPy and Python are seeded from the record's, and
    restored after the call, so that an epoch repeats for any number of workers. Picklable if ``transform``
    is. Not thread-safe: use processes. In a worker PyTorch uses one thread. Raises UsageError for wrong
    options; the call raises BadImage as :func:`.decode_rgb` does, and the errors of ``transform``.
    """

    transform: Callable[[Any], Any]
    _: KW_ONLY
    image: Literal["tensor", "pil"] = "tensor"
    orientation: Orientation = "ignore"
    outputs: tuple[ArraySpec, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("image", self.image, ("tensor", "pil"))
        check_wrapper(self.transform, self.orientation, self.outputs)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        """Return the transform's results for the record's image, as arrays."""
        pixels = decode_rgb(record.image, orientation=self.orientation, key=record.key)
        image: Any
        if self.image == "pil":
            image = Image.fromarray(pixels)
        else:
            image = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
        with seeded_globally(rng):
            return in_arrays(self.transform(image))

    @property
    def identity(self) -> tuple[object, ...]:
        version = LibraryVersion(torchvision.__version__)
        return version, self.transform, self.image, self.orientation, self.outputs
