"""Arrays to tensors, without a copy wherever that is safe.

TensorFlow takes the very memory of an array that is lent to it if that is C-contiguous, writeable, of native
byte order and starts on 64 bytes, as all of a Loader's are; it keeps the array alive, and with it the loader's
slot, until its last use. At any other address it would abort the process. Lent are arrays of a source that
never changes what it has delivered (``batches_never_change``). Everything else is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...formats.errors import UsageError
from ..memory import ALIGNMENT, aligned
from .framework import tf

PLAIN_KINDS = "biufc"


def tensor_of(part: Any, spec: Any, *, lend: bool) -> Any:
    """An eager tensor of a batch's part. Raises UsageError where it is not what ``spec`` says."""
    if tf.is_tensor(part):
        return _checked(part, spec)
    array = array_of(part, spec, lend=lend)
    if array.dtype.kind in PLAIN_KINDS:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array, spec.dtype)


def array_of(part: Any, spec: Any, *, lend: bool) -> npt.NDArray[Any]:
    """The part as an array that TensorFlow may take as it is. Raises UsageError where it is not what ``spec`` says."""
    if spec.dtype == tf.string:
        return _checked(_strings(part), spec)  # type: ignore[no-any-return]
    array = _as_array(part, spec)
    if (
        not isinstance(part, np.ndarray)
        and array.dtype != spec.dtype.as_numpy_dtype
        and array.dtype.kind in "iufb"
    ):
        array = _as_wide(array, spec)
    return _lendable(_checked(array, spec), lend=lend)


def blanks(specs: Sequence[Any]) -> list[Any]:
    """Empty tensors of these dtypes, for an element that carries none."""
    return [tf.zeros([0] * (spec.shape.rank or 0), spec.dtype) for spec in specs]


def blank_arrays(specs: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """The same as arrays."""
    return [np.zeros([0] * (spec.shape.rank or 0), spec.dtype.as_numpy_dtype) for spec in specs]


def _as_array(part: Any, spec: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(part)
    except ValueError as error:
        raise UsageError(
            f"a batch has {type(part).__name__} that is no array ({error}) where its signature says "
            f"{spec.dtype.name} {spec.shape}; fix it or the signature"
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
    """What TensorFlow calls it, or NumPy where that knows no such dtype."""
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
    """Python's numbers have no width: they get the signature's, where they fit into it."""
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    wide = array.astype(dtype)
    if not np.array_equal(wide, array) and not (array.dtype.kind == dtype.kind == "f"):
        raise UsageError(
            f"a batch has numbers that are no {dtype.name}, which its signature says; fix it or the signature"
        )
    return wide


def _lendable(array: npt.NDArray[Any], *, lend: bool) -> npt.NDArray[Any]:
    flags = array.flags
    if array.dtype.kind not in PLAIN_KINDS:
        return array
    is_as_needed = flags.c_contiguous and flags.writeable and array.dtype.isnative
    if lend and is_as_needed and array.ctypes.data % ALIGNMENT == 0:
        return array
    dtype = array.dtype.newbyteorder("=")
    fresh = aligned(array.nbytes).view(dtype).reshape(array.shape)
    fresh[...] = array
    return fresh
