"""The base of the wrappers for transforms of other libraries."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.contract import (
    Array,
    ArraySpec,
    TransformInput,
    check_choice,
    check_outputs,
    write_rows,
)
from shardprep.loaders.transforms.decode import ORIENTATIONS, EncodedImage, Orientation, Pixels, decode_rgb
from shardprep.loaders.transforms.geometry import ShownPart
from shardprep.loaders.transforms.transforms import Choice, EvalTransform, TrainTransform


@dataclass(frozen=True)
class WrappedTransform(ABC):
    """Base of the wrappers. ``transform`` gets a record's image, or what ``crop`` makes of it."""

    transform: Any
    _: KW_ONLY
    crop: TrainTransform | EvalTransform | None = None
    orientation: Orientation = "ignore"
    outputs: tuple[ArraySpec, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.transform, type) or not callable(self.transform):
            raise UsageError(
                f"transform must be a callable, such as a Compose([...]), not {self.transform!r}"
            )
        check_choice("orientation", self.orientation, ORIENTATIONS)
        check_outputs(self.outputs)
        if self.crop is None:
            return
        if not isinstance(self.crop, TrainTransform | EvalTransform):
            raise UsageError(f"crop must be a TrainTransform, an EvalTransform or None, not {self.crop!r}")
        if len(self.crop.outputs) > 1 or self.crop.outputs[0].shape[2:] != (3,) or self.crop.dtype != "uint8":
            raise UsageError(f"crop must make a uint8 image in HWC, without masks and boxes: {self.crop!r}")
        if self.orientation != "ignore":
            raise UsageError("with a crop, give it the orientation: crop=TrainTransform(224, orientation=…)")

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        """Return the transform's results as arrays."""
        if self.crop:
            return self.applied(self.crop(record, rng), rng)
        return self.applied(decode_rgb(record.image, orientation=self.orientation, key=record.key), rng)

    @abstractmethod
    def applied(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        """Call ``transform`` with uint8 pixels [height, width, 3], and return its results as arrays."""

    def render(
        self,
        record: TransformInput,
        image: EncodedImage,
        choice: Choice,
        rng: np.random.Generator,
        *rows: Array,
    ) -> None:
        """Write the results for a choice of :attr:`crop`, as :meth:`.ImageTransform.render` does."""
        crop: Any = self.crop  # Views calls this only if there is one
        pixels = np.empty(crop.outputs[0].shape, np.uint8)
        crop.render(record, image, choice, rng, pixels)
        write_rows(self.applied(pixels, rng), rows, "the transform", key=record.key)

    @property
    def shown(self) -> Callable[[TransformInput, np.random.Generator], ShownPart] | None:
        """The crop's method for replays; None without a crop, since other libraries do not report theirs."""
        return self.crop.shown if self.crop else None

    @property
    def options(self) -> tuple[object, ...]:
        """The values that determine the results, besides the library's version and ``transform``."""
        return self.orientation, self.outputs, *([self.crop] if self.crop else [])


@contextmanager
def seed_global_generators(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and PyTorch (CPU) within the context. Not thread-safe."""
    torch = sys.modules.get("torch")
    generator = torch.random.default_generator if torch is not None else None
    states = random.getstate(), np.random.get_state(), generator and generator.get_state()
    words = rng.integers(1 << 32, size=3, dtype=np.uint32)
    try:
        random.seed(int(words[0]))
        np.random.seed(words[1])
        if generator is not None:
            generator.manual_seed(int(words[2]))
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if generator is not None:
            generator.set_state(states[2])
