"""Transforms that make one stage of a loader slow, defined here so that worker processes can import them."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.loaders import ArraySpec, TransformInput

Few = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Nothing:
    """Return eight zeros at once."""

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        return (ArraySpec("image", (8,), "uint8"),)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Few:
        return np.zeros(8, np.uint8)


@dataclass(frozen=True)
class Sleeping(Nothing):
    """Take so many seconds, but no CPU: other workers are as fast beside it on a busy machine."""

    seconds: float

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Few:
        time.sleep(self.seconds)
        return super().__call__(record, rng)


@dataclass(frozen=True)
class Computing(Nothing):
    """Take so many seconds of a CPU."""

    seconds: float

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Few:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return super().__call__(record, rng)
