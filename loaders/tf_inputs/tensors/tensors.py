"""Conversion of arrays to tensors, without a copy where that is safe.

TensorFlow uses the memory of an array directly if the array is C-contiguous, writeable, of native byte order
and aligned to 64 bytes, as all arrays of a Loader are. It keeps the array, and so the loader's slot, until
its last use. At any other address it aborts the process. Only arrays of a source that never changes its
batches (``batches_never_change``) are shared in this way. All others are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.memory import ALIGNMENT, aligned

from .framework import tf
from .signature import Leaves, flat, leaves_of, names_of

PLAIN_KINDS = "biufc"


def tensor_of(part: Any, spec: Any, *, zero_copy: bool) -> Any:
    """Return an eager tensor of a batch's part. Raises UsageError where the part does not match ``spec``."""
    if tf.is_tensor(part):
        return _checked(part, spec)
    array = array_of(part, spec, zero_copy=zero_copy)
    if array.dtype.kind in PLAIN_KINDS:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array, spec.dtype)


def array_of(part: Any, spec: Any, *, zero_copy: bool) -> npt.NDArray[Any]:
    """Return the part as an array that TensorFlow can use without a copy.

    Raises UsageError where the part does not match ``spec``.
    """
    if spec.dtype == tf.string:
        return _checked(_strings(part), spec)  # type: ignore[no-any-return]
    array = _as_array(part, spec)
    if (
        not isinstance(part, np.ndarray)
        and array.dtype != spec.dtype.as_numpy_dtype
        and array.dtype.kind in "iufb"
    ):
        array = _as_wide(array, spec)
    return _tensorflow_ready(_checked(array, spec), zero_copy=zero_copy)


def empty_tensors(specs: Sequence[Any]) -> list[Any]:
    """Empty tensors of these dtypes, for an element without a batch."""
    return [tf.zeros([0] * (spec.shape.rank or 0), spec.dtype) for spec in specs]


def empty_arrays(specs: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """Empty arrays of these dtypes, for an element without a batch."""
    return [np.zeros([0] * (spec.shape.rank or 0), spec.dtype.as_numpy_dtype) for spec in specs]


def _as_array(part: Any, spec: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(part)
    except ValueError as error:
        raise UsageError(
            f"a batch has {type(part).__name__} that is no array ({error}) where its signature says "
            f"{spec.dtype.name} {spec.shape}; pad or crop its rows to one shape, or fix the signature"
        ) from error


def _checked(value: Any, spec: Any) -> Any:
    dtype = value.dtype.name if tf.is_tensor(value) else _name(value.dtype)
    if dtype != spec.dtype.name or not spec.shape.is_compatible_with(value.shape):
        raise UsageError(
            f"a batch has {dtype} {list(value.shape)} where its signature says "
            f"{spec.dtype.name} {spec.shape}; fix it or the signature"
        )
    return value


def _name(dtype: np.dtype[Any]) -> str:
    """TensorFlow's name of the dtype, or NumPy's where TensorFlow has no such dtype."""
    try:
        return str(tf.as_dtype(dtype).name)
    except TypeError:
        return dtype.name


def _strings(part: Any) -> npt.NDArray[Any]:
    if isinstance(part, list | tuple):
        strings = np.empty(len(part), object)
        strings[:] = [x if isinstance(x, str) else bytes(x) for x in part]
        return strings
    return np.asarray(part, object)


def _as_wide(array: npt.NDArray[Any], spec: Any) -> npt.NDArray[Any]:
    """Convert Python's numbers, which have no width, to the signature's dtype. UsageError if it cannot."""
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    wide = array.astype(dtype)
    if not np.array_equal(wide, array) and not (array.dtype.kind == dtype.kind == "f"):
        raise UsageError(
            f"a batch has numbers that are no {dtype.name}, which its signature says; fix it or the signature"
        )
    return wide


def _tensorflow_ready(array: npt.NDArray[Any], *, zero_copy: bool) -> npt.NDArray[Any]:
    flags = array.flags
    if array.dtype.kind not in PLAIN_KINDS:
        return array
    is_as_needed = flags.c_contiguous and flags.writeable and array.dtype.isnative
    if zero_copy and is_as_needed and array.ctypes.data % ALIGNMENT == 0:
        return array
    dtype = array.dtype.newbyteorder("=")
    fresh = aligned(array.nbytes).view(dtype).reshape(array.shape)
    fresh[...] = array
    return fresh


def tensors_of(element_spec: Any, batch: Any, *, zero_copy: bool) -> Leaves:
    """Return a batch's parts as eager tensors, in the order of the leaves.

    ``zero_copy`` shares the memory of arrays where TensorFlow can use it.
    """
    return _converted(tensor_of, element_spec, batch, zero_copy=zero_copy)


def arrays_of(element_spec: Any, batch: Any, *, zero_copy: bool) -> Leaves:
    """Return a batch's parts as arrays that TensorFlow can use without a copy."""
    return _converted(array_of, element_spec, batch, zero_copy=zero_copy)


def _converted(convert: Callable[..., Any], element_spec: Any, batch: Any, *, zero_copy: bool) -> Leaves:
    parts, specs = leaves_of(element_spec, batch), flat(element_spec)
    made = []
    for part, spec, name in zip(parts, specs, names_of(element_spec), strict=True):
        try:
            made.append(convert(part, spec, zero_copy=zero_copy))
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}" if name else error.message) from error
    return made
