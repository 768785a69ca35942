"""The randomness of training transforms: crops, colours, and the generators of libraries."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.crop_ready import Crop
from shardprep.loaders.transforms.contract import are_numbers

Matrix = npt.NDArray[np.float64]

CROP_TRIES = 10  # as torchvision's RandomResizedCrop
CROP_DRAWS = 2 + 2 * CROP_TRIES
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, of R, G, B

# The principal components of ImageNet's RGB values in 0..1 (Krizhevsky et al. 2012, with the numbers
# of fb.resnet.torch): one eigenvector per column.
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


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
        strengths = (self.brightness, self.contrast, self.saturation)
        if not are_numbers(strengths, 3) or min(strengths) < 0:
            raise UsageError(f"the strengths of a colour jitter must be at least 0 and finite: {self}")

    def matrix(self, mean: npt.ArrayLike, draws: Sequence[float]) -> Matrix:
        """Return the 3 x 4 map for an image with this mean colour; ``draws`` are three numbers in [0, 1)."""
        strengths = (self.brightness, self.contrast, self.saturation)
        brightness, contrast, saturation = map(_factor, strengths, draws)
        gray = brightness * float(LUMA @ np.asarray(mean)[:3])
        colours = saturation * np.eye(3) + (1 - saturation) * LUMA  # rows sum to 1: grays stay
        offset = np.full((3, 1), (1 - contrast) * gray)
        return np.hstack([brightness * contrast * colours, offset])


def _factor(strength: float, draw: float) -> float:
    low, high = max(0.0, 1 - strength), 1 + strength
    return low + (high - low) * draw


def lighting_offset(weights: npt.ArrayLike) -> Matrix:
    """Return AlexNet's lighting noise, added to R, G, B in 0..255, for three normally distributed weights."""
    added: Matrix = 255 * EIGENVECTORS @ (EIGENVALUES * np.asarray(weights))
    return added


@contextmanager
def seeded_globally(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and PyTorch (CPU) within the context. Not thread-safe."""
    torch = sys.modules.get("torch")
    of_torch = torch.random.default_generator if torch is not None else None
    states = random.getstate(), np.random.get_state(), of_torch and of_torch.get_state()
    words = rng.integers(1 << 32, size=3, dtype=np.uint32)
    try:
        random.seed(int(words[0]))
        np.random.seed(words[1])
        if of_torch is not None:
            of_torch.manual_seed(int(words[2]))
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if of_torch is not None:
            of_torch.set_state(states[2])
