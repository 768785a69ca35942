"""Batches as pytrees of JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import MissingExtra, UsageError
from shardprep.loaders.batches.passes import Source
from shardprep.loaders.batches.slots import NUMBERS
from shardprep.loaders.batches.stack import Conversion

try:
    import jax
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.jax_data", "JAX", "jax") from error


def to_jax(source: Source, *, device: Any = None) -> Conversion:
    """Return the batches of ``source`` as pytrees of JAX arrays; each iteration is one epoch.

    ``source`` is a Loader, an iterable or a function that returns an iterable. ``device`` is a device or a
    sharding, over several processes, too: each batch is then this process's rows of global arrays. None is
    JAX's default, uncommitted. The result has a ``len()`` if the source has one. Tuples, lists and dicts are
    kept; bytes, memoryviews, strings and objects are not changed.

    On a CPU device, arrays that are contiguous and start at a multiple of 64 bytes, as a Loader's do, are not
    copied. JAX keeps their memory, and with it the slot, until its last use, and releases it in its next call
    after that. Steps that JAX has queued also hold their batches. A source other than a Loader must not write
    to an array that it has delivered. All other arrays, and all arrays for another device, are copied once.

    Without ``jax_enable_x64`` JAX has no 64-bit numbers: int64 (labels, record numbers) becomes int32,
    float64 becomes float32, and so on, in one copy. Iterating raises UsageError where an integer does not
    fit. Errors of the source are raised unchanged. Not picklable, not thread-safe.
    """
    return Conversion(source, partial(jax_array_of, device=device))


def jax_array_of(part: Any, device: Any = None) -> Any:
    """Convert an array of numbers, if its integers fit; return anything else unchanged."""
    if not isinstance(part, np.ndarray):
        return part
    if part.dtype.kind not in NUMBERS and not jax.numpy.issubdtype(part.dtype, np.inexact):  # as bfloat16 is
        return part
    dtype = jax.dtypes.canonicalize_dtype(part.dtype.newbyteorder("="))
    array: npt.NDArray[Any] = part if part.dtype == dtype else part.astype(dtype)
    if dtype.kind in "iu" and part.dtype != dtype and (array != part).any():
        raise UsageError(
            f"{part.dtype} numbers of a batch do not fit {dtype}, the widest type that JAX has by default; "
            "set jax_enable_x64, or deliver smaller numbers"
        )
    if not getattr(device, "is_fully_addressable", True):  # each process has its own rows
        return jax.make_array_from_process_local_data(device, array)
    # Not by DLPack: JAX waits for its computations while it holds the interpreter's lock, which the thread
    # that releases a DLPack array needs. After `device_put`, the next call of JAX releases the array.
    return jax.device_put(array, device)
