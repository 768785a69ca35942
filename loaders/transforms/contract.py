"""The interface of a transform: a callable from an encoded image to arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.decoder import Encoded

Array = npt.NDArray[Any]


class TransformInput(Protocol):
    """The record that a transform is given.

    ``key`` is its name, ``label`` its class number, ``image`` its encoded bytes, valid only during the call,
    and ``columns`` the values of the dataset's columns by name, read when they are asked for.
    """

    @property
    def key(self) -> str: ...
    @property
    def label(self) -> int: ...
    @property
    def image(self) -> Encoded: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array that a transform makes of every record: its ``name``, ``shape`` and numpy ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Transform(Protocol):
    """A picklable callable of a record and its random generator, such as a plain function.

    All its randomness must come from ``rng``, which depends only on (seed, epoch, record) and is valid only
    during the call: then batches are the same for any number of workers. It may have

    - ``outputs``, the specs of the arrays it returns, in order. Without them, or with None, results are
      stacked as they are: an array or a number to an array, a tuple to as many parts of the batch, a dict to
      one part, a dict of arrays. What differs in shape or dtype within a batch, or is neither an array nor a
      number, is a list with one element per record: pad or crop to one shape what is to be an array. In the
      same batch, results must have equally many parts, or the same names.
    - ``fill(record, rng, *arrays)``, which writes the outputs to rows of a batch, C-contiguous and of
      undefined content, and saves a copy.
    - ``shown(record, rng)``, which returns the :class:`.ShownPart` that the call with the same random numbers
      shows, for replays.
    """

    def __call__(self, record: TransformInput, rng: np.random.Generator, /) -> Any: ...


def outputs_of(transform: Transform) -> tuple[ArraySpec, ...] | None:
    """Return the arrays that the transform declares; None if results are of any size. Raises UsageError."""
    if isinstance(transform, type) or not callable(transform):
        raise UsageError(
            f"transform must be a callable of a record, such as TrainTransform(224), not {transform!r}"
        )
    outputs: tuple[ArraySpec, ...] | None = getattr(transform, "outputs", None)
    if not (
        outputs is None or (isinstance(outputs, tuple) and all(isinstance(s, ArraySpec) for s in outputs))
    ):
        raise UsageError(f"a transform's outputs must be a tuple of ArraySpec, not {outputs!r}")
    return outputs


def fill_rows(
    transform: Transform, record: TransformInput, rng: np.random.Generator, rows: tuple[Array, ...]
) -> None:
    """Write the transform's outputs to ``rows``, one array for each of its specs.

    Raises UsageError where the transform returns other arrays than it declares.
    """
    fill = getattr(transform, "fill", None)
    if fill is not None:
        fill(record, rng, *rows)
        return
    made = transform(record, rng)
    arrays = made if isinstance(made, tuple) else (made,)
    is_as_declared = len(arrays) == len(rows) and all(
        np.shape(array) == row.shape and np.asarray(array).dtype == row.dtype
        for array, row in zip(arrays, rows, strict=True)
    )
    if not is_as_declared:
        returned = ", ".join(f"{np.asarray(a).dtype}{list(np.shape(a))}" for a in arrays)
        declared = ", ".join(f"{row.dtype}{list(row.shape)}" for row in rows)
        raise UsageError(f"the transform declares {declared} and returns {returned}", key=record.key)
    for array, row in zip(arrays, rows, strict=True):
        row[...] = array
