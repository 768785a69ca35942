"""The interface of transforms, the form of their results, and checks that transforms share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.decode import Encoded, cv2
from shardprep.formats.records.record import check_transform
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import accepts_arguments, is_number


def are_numbers(values: object, count: int) -> TypeGuard[tuple[float, ...]]:
    """Whether the value is a tuple, list or array of exactly ``count`` numbers."""
    if not isinstance(values, tuple | list | np.ndarray) or getattr(values, "ndim", 1) != 1:
        return False
    return len(values) == count and all(map(is_number, values))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise UsageError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


Array = npt.NDArray[Any]


class TransformInput(Protocol):
    """The record that a transform gets.

    ``key`` is its name, ``label`` its class number, ``image`` its encoded bytes, valid only during the call,
    and ``columns`` the values of the dataset's columns by name, read on access.
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

    def __post_init__(self) -> None:
        """Raise UsageError unless an array of numbers, dates or text can fit."""
        try:
            is_array = not np.empty((0, *self.shape), self.dtype).dtype.hasobject
        except (TypeError, ValueError, SyntaxError):  # NumPy parses a dtype's text as code
            is_array = False
        if not is_array or not isinstance(self.shape, tuple) or not isinstance(self.name, str):
            raise UsageError(f"an array has a name, a tuple of sizes and a dtype, not {self}")

    @property
    def nbytes(self) -> int:
        """Bytes of one array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Transform(Protocol):
    """A picklable callable of a record and its random generator, such as a plain function.

    All its randomness must come from ``rng``, which depends only on (seed, epoch, record) and is valid only
    during the call: then batches are the same for any number of workers. It may have

    - ``outputs``, the specs of the arrays it returns, in order. Without them, or with None, results are
      stacked: arrays or numbers become an array, a tuple one part of the batch per element, a dict a dict of
      arrays. Values that differ in shape or dtype within a batch, or are neither numbers nor arrays of
      NumPy's own numbers, become a list with one element per record: pad or crop them to one shape to get
      an array. Within a batch, results must have the same number of parts, or the same names.
    - ``fill(record, rng, *arrays)``, which writes the outputs to rows of a batch, C-contiguous and of
      undefined content, and saves a copy.
    - ``shown(record, rng)``, which returns, for replays, the :class:`.ShownPart` that a call with the same
      random numbers shows.
    """

    def __call__(self, record: TransformInput, rng: np.random.Generator, /) -> Any: ...


def outputs_of(transform: Transform) -> tuple[ArraySpec, ...] | None:
    """Return the arrays that the transform declares, None if it declares none. Raises UsageError."""
    check_transform(transform)
    if not accepts_arguments(transform, 2):
        raise UsageError(f"transform must be a callable of (record, rng), not {transform!r}")
    return check_outputs(getattr(transform, "outputs", None))


def check_outputs(outputs: Any) -> tuple[ArraySpec, ...] | None:
    """Return declared outputs. Raises UsageError unless they are a tuple of ArraySpec, or None."""
    if not (
        outputs is None or (isinstance(outputs, tuple) and all(isinstance(s, ArraySpec) for s in outputs))
    ):
        raise UsageError(f"a transform's outputs must be a tuple of ArraySpec, not {outputs!r}")
    return outputs


def fill_rows(
    transform: Transform, record: TransformInput, rng: np.random.Generator, rows: tuple[Array, ...]
) -> None:
    """Write the transform's outputs to ``rows``. Raises UsageError for arrays that it does not declare."""
    fill = getattr(transform, "fill", None)
    if fill is not None:
        fill(record, rng, *rows)
    else:
        write_rows(transform(record, rng), rows, "the transform", key=record.key)


def write_rows(result: Any, rows: Sequence[Array], maker: str, *, key: str | None = None) -> None:
    """Write an array, or a tuple of arrays, to ``rows``. Raises UsageError if shapes or dtypes differ."""
    arrays = result if isinstance(result, tuple) else (result,)
    is_as_declared = len(arrays) == len(rows) and all(
        np.shape(array) == row.shape and np.asarray(array).dtype == row.dtype
        for array, row in zip(arrays, rows, strict=True)
    )
    if not is_as_declared:
        returned = ", ".join(f"{np.asarray(a).dtype}{list(np.shape(a))}" for a in arrays)
        declared = ", ".join(f"{row.dtype}{list(row.shape)}" for row in rows)
        raise UsageError(f"{maker} declares {declared} and returns {returned}", key=key)
    for array, row in zip(arrays, rows, strict=True):
        row[...] = array


IMAGE = "image"
SMALL_BYTES = 4096  # reading takes longer than the overhead of each value beyond that


@dataclass(frozen=True)
class AsColumns:
    """A transform to a dict of the values of ``names``: columns, and "image" for the encoded bytes.

    ``rows`` are the arrays of the columns with values of one size, which workers write to a batch's rows.
    ``json`` are the JSON columns. Picklable and thread-safe.
    """

    names: tuple[str, ...]
    rows: tuple[ArraySpec, ...] = ()
    json: tuple[str, ...] = ()

    @cached_property
    def varying_names(self) -> tuple[str, ...]:
        """The columns with values of different sizes."""
        written = {spec.name for spec in self.rows}
        return tuple(name for name in self.names if name not in written)

    @cached_property
    def small_names(self) -> tuple[str, ...]:
        """The columns with small values of one size, which are read for several records at once."""
        return tuple(spec.name for spec in self.rows if spec.nbytes <= SMALL_BYTES)

    @cached_property
    def without_small(self) -> AsColumns:
        names = tuple(name for name in self.names if name not in self.small_names)
        return AsColumns(names, tuple(spec for spec in self.rows if spec.name in names), self.json)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        return _column_values(record, self.names)

    def write(self, record: TransformInput, rows: Mapping[str, npt.NDArray[Any]], row: int) -> object:
        """Write the values of one size to a row of each array; return the others, None if there are none."""
        for spec in self.rows:
            rows[spec.name][row] = record.columns[spec.name]
        return _column_values(record, self.varying_names) or None


def _column_values(record: TransformInput, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: record.image if name == IMAGE else record.columns[name] for name in names}


Layout = Literal["HWC", "CHW", "NHWC", "NCHW", "channels_last", "channels_first"]
PixelType = Literal["uint8", "float32", "float16", "bfloat16"]

CHANNELS_LAST = ("HWC", "NHWC", "channels_last")
CHANNELS_FIRST = ("CHW", "NCHW", "channels_first")
# NumPy has no bfloat16: batches hold its bits.
NUMPY_DTYPES = {"uint8": "uint8", "float32": "float32", "float16": "float16", "bfloat16": "uint16"}

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of R, G, B in 0..1 over the training images
IMAGENET_STD = (0.229, 0.224, 0.225)
LARGEST_STD = 16.0  # of values from 0 to 1; those of values from 0 to 255 are larger


@dataclass(frozen=True)
class PixelFormat:
    """The layout and dtype of converted RGB pixels; floats are (value / 255 - mean) / std.

    float32 is exact to 2e-7 / std; float16 and bfloat16 are rounded from it to the nearest. float32 takes
    four times the memory of uint8 and about 140 µs per image of 224 x 224; the other two take half its memory
    and more time. Normalising on the training device takes less.
    """

    layout: Layout = "HWC"
    dtype: PixelType = "uint8"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, CHANNELS_LAST + CHANNELS_FIRST)
        check_choice("dtype", self.dtype, NUMPY_DTYPES)
        if not are_numbers(self.mean, 3) or not are_numbers(self.std, 3) or min(self.std) <= 0:
            raise UsageError(f"mean and std must be three finite numbers each, those of std positive: {self}")
        if max(self.mean) > 1 or max(self.std) > LARGEST_STD:
            raise UsageError(f"mean and std are of values from 0 to 1, not 0 to 255: {self}")

    @property
    def is_plain(self) -> bool:
        """Whether this is the form of decoded images, so that they can be resized into a batch."""
        return self._channels_last and self.dtype == "uint8"

    @property
    def numpy_dtype(self) -> str:
        """The NumPy dtype of an image; uint16 for the bits of bfloat16."""
        return NUMPY_DTYPES[self.dtype]

    def shape(self, height: int, width: int) -> tuple[int, int, int]:
        return (height, width, 3) if self._channels_last else (3, height, width)

    def write(self, image: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Write uint8 RGB pixels to C-contiguous ``out`` of this shape and dtype, which may be ``image``."""
        if not self._channels_last:
            planes = out if self.dtype == "uint8" else np.empty(out.shape, np.uint8)
            cv2.split(image, list(planes))
            image = planes
        exact = out if self.dtype in ("uint8", "float32") else np.empty(out.shape, np.float32)
        if image is not exact:
            np.copyto(exact, image)
        if self.dtype == "uint8":
            return
        (scale, offset), values = self._affine, exact
        if self._channels_last:
            # whole rows: an inner loop over three channels takes five times as long
            values = exact.reshape(len(exact), -1)
            scale, offset = np.resize(scale, values.shape[1]), np.resize(offset, values.shape[1])
        values *= scale
        values += offset
        if exact is not out:
            np.copyto(out, exact if self.dtype == "float16" else bfloat16_bits(exact), casting="same_kind")

    @cached_property
    def _channels_last(self) -> bool:
        return self.layout in CHANNELS_LAST

    @cached_property
    def _affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        mean, std = np.reshape(self.mean, (3, 1, 1)), np.reshape(self.std, (3, 1, 1))
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 values; ties round to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class LibraryVersion(str):
    """A library's version in a transform's ``identity``; a state may be resumed with another version."""

    __slots__ = ()


def to_arrays(result: Any) -> Any:
    """Convert tensors and PIL images to arrays, also in tuples, lists and dicts; leave anything else.

    A tensor's memory is shared. bfloat16 becomes uint16 with the same bits, because NumPy lacks it.
    """
    return convert_leaves(result, _to_array)


def convert_leaves(
    value: Any, convert: Callable[[Any], Any], *, kinds: tuple[type[Any], ...] = (Mapping, tuple, list)
) -> Any:
    """Convert the leaves of a nested value: the parts that are of none of these kinds of containers."""
    if not isinstance(value, kinds):
        return convert(value)
    if isinstance(value, Mapping):
        return {name: convert_leaves(part, convert, kinds=kinds) for name, part in value.items()}
    form: Any = type(value)
    parts = [convert_leaves(part, convert, kinds=kinds) for part in value]
    return form(*parts) if hasattr(form, "_fields") else form(parts)


def _to_array(part: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        tensor = part.detach().as_subclass(torch.Tensor)
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16)
        return tensor.numpy()
    is_picture = hasattr(part, "__array_interface__") and not isinstance(part, np.ndarray | np.generic)
    return np.asarray(part) if is_picture else part
