"""Into JAX: batches as pytrees of JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .conversion import NUMBERS, Conversion
from .passes import Source

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError("JAX is not installed; pip install 'shardprep[jax]'") from error


def to_jax(source: Source, *, device: Any = None) -> Conversion:
    """The batches of a Loader, an iterable or a function as pytrees of JAX arrays; each iteration is one epoch.

    ``device`` is a device or a sharding; None is JAX's default, uncommitted. ``len()`` where the source knows
    it. Tuples, lists and dicts are kept; bytes, memoryviews, strings and objects stay as they are.

    On a CPU device, arrays that are contiguous and start on 64 bytes, as a Loader's do, are not copied: JAX
    takes their memory and keeps it, and with it the slot, until its last use; it gives it back in the next
    call of JAX after that. Steps that JAX has queued hold their batches, too. A source of your own must not
    write to an array that it has delivered. Everything else, and everything for another device, is copied
    once.

    Without ``jax_enable_x64`` JAX has no 64-bit numbers: int64 (labels, record numbers) becomes int32, float64
    float32, and so on, in one copy. Raises UsageError where an integer does not fit. A source's error comes as
    itself. Not picklable, not thread-safe.
    """
    return Conversion(source, partial(jax_array_of, device=device))


def jax_array_of(part: Any, device: Any = None) -> Any:
    """A JAX array of an array of numbers; anything else as it is. Raises UsageError for integers too great."""
    if not isinstance(part, np.ndarray) or part.dtype.kind not in NUMBERS:
        return part
    # Not by DLPack: JAX waits for its computations while it holds the interpreter's lock, which the thread
    # that gives a DLPack array back needs. `device_put` leaves that to the next call of JAX.
    return jax.device_put(_in_jax_width(part), device)


def _in_jax_width(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if array.dtype == dtype:
        return array
    narrow: npt.NDArray[Any] = array.astype(dtype)
    if dtype.kind in "iu" and (narrow != array).any():
        raise UsageError(
            f"{array.dtype} numbers of a batch do not fit {dtype}, the widest that JAX has by default; "
            "set jax_enable_x64, or deliver smaller ones"
        )
    return narrow
