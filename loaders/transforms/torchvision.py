"""A wrapper for transforms of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from shardprep.formats.errors import MissingExtra
from shardprep.loaders.transforms.contract import LibraryVersion, check_choice, to_arrays
from shardprep.loaders.transforms.decode import Pixels
from shardprep.loaders.transforms.wrapper import WrappedTransform, seed_global_generators

try:
    import torch
    import torchvision
    from PIL import Image
    from torchvision import tv_tensors
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.transforms.torchvision", "torchvision", "torchvision") from error


@dataclass(frozen=True)
class Torchvision(WrappedTransform):
    """A transform that decodes a record's image and calls ``transform``, such as torchvision's v2.Compose.

    The label is delivered beside the results, and is not given to ``transform``.

    The global random generators of PyTorch (for CPUs), NumPy and Python are seeded from the record's, and
    restored after the call, so that an epoch repeats for any number of workers. Picklable if ``transform``
    is. Not thread-safe: use processes. In a worker PyTorch uses one thread. The call raises BadImage as
    :func:`.decode_rgb` does, and the errors of ``transform``.

    Args:
        transform: Gets a ``tv_tensors.Image``, uint8 [3, height, width] in RGB, or, with ``image="pil"``, a
            PIL image. Its results become arrays: tensors over the same memory (bfloat16 as uint16 with the
            same bits), PIL images as uint8 [height, width, 3]; see :class:`.Transform` for tuples and dicts.
        image: "tensor" or "pil".
        crop: A :class:`.TrainTransform` or :class:`.EvalTransform`, whose uint8 image ``transform`` gets in
            place of the whole one: faster than a crop by torchvision, most of all from crop-ready shards.
        orientation: As for :func:`.decode_rgb`; with ``crop``, its own option.
        outputs: The specs of the results, which may be declared.

    Raises:
        UsageError: An option is invalid, or ``crop`` makes anything but one uint8 image in HWC.
    """

    transform: Callable[[Any], Any]
    _: KW_ONLY
    image: Literal["tensor", "pil"] = "tensor"

    def __post_init__(self) -> None:
        check_choice("image", self.image, ("tensor", "pil"))
        super().__post_init__()

    def applied(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        image: Any
        if self.image == "pil":
            image = Image.fromarray(pixels)
        else:
            image = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
        with seed_global_generators(rng):
            return to_arrays(self.transform(image))

    @property
    def identity(self) -> tuple[object, ...]:
        return LibraryVersion(torchvision.__version__), self.transform, self.image, *self.options
