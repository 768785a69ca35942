"""Signatures of batches, and conversion of arrays to tensors, without a copy where that is safe.

TensorFlow uses an array's memory directly if the array is C-contiguous, writeable, of native byte order and
aligned to 64 bytes, as all arrays of a Loader are. It keeps the array, and so the loader's slot, until its
last use. At any other address it aborts the process. Only arrays of a source that never changes its batches
(``batches_never_change``) are shared in this way. All others are copied once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import MissingExtra, UsageError
from shardprep.formats.runtime.progress import byte_count, check_int
from shardprep.loaders.batches.passes import Passes
from shardprep.loaders.batches.pickling import ALIGNMENT, allocate_aligned
from shardprep.loaders.batches.slots import NUMBERS
from shardprep.loaders.batches.stack import JsonValues, to_unmasked_array

try:
    import tensorflow
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.tf_inputs", "TensorFlow", "tensorflow") from error

tf: Any = tensorflow
Leaves = list[Any]
DEFAULT_CAPACITY = 2


def leaves_of(signature: Any, batch: Any) -> list[Any]:
    """Return the parts of ``batch`` in the order of the signature's leaves. Raises UsageError."""
    return [part for _, _, part in _walk(signature, batch)]


def _walk(signature: Any, batch: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each leaf: its name in the innermost dict ("" without one), its spec and its part."""
    if isinstance(signature, Mapping):
        if not isinstance(batch, Mapping) or batch.keys() != signature.keys():
            raise UsageError(
                f"a batch should be a dict of {sorted(map(str, signature))}, but is {_describe(batch)}; fix it or the signature"
            )
        for inner, spec in signature.items():
            yield from _walk(spec, batch[inner], str(inner))
    elif isinstance(signature, tuple | list):
        if not isinstance(batch, tuple | list) or len(batch) != len(signature):
            raise UsageError(
                f"a batch should have {len(signature)} parts, but is {_describe(batch)}; fix it or the signature"
            )
        for spec, part in zip(signature, batch, strict=True):
            yield from _walk(spec, part, name)
    else:
        yield name, signature, batch


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict of {sorted(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"one {type(batch).__name__}"


def signature_of(passes: Passes, signature: Any = None) -> Any:
    """Return the ``tf.TensorSpec`` of each part of a batch: as given, or from the source or its first batch.

    A signature from a first batch leaves the number of rows open, because the last batch may have fewer.
    Raises UsageError if the signature cannot be determined.
    """
    if signature is not None:
        flatten(signature)  # refuses anything but specs
        return signature
    if (element_spec := getattr(passes.source, "element_spec", None)) is not None:
        return element_spec
    if (specs := getattr(passes.source, "batch_specs", None)) is not None:
        return tuple(tf.TensorSpec(s.shape, s.dtype or tf.string, name=s.name) for s in specs)
    return _map_parts(_spec_of, _first_batch(passes))


def _first_batch(passes: Passes) -> Any:
    """Return the first batch of the next pass without taking it."""
    first_batch = getattr(passes.source, "first_batch", None)
    if not callable(first_batch):
        return passes.peek()
    batch = first_batch()  # keeps the Loader's position
    _refuse_lists(batch)
    return batch


def _refuse_lists(part: Any, name: str | None = None) -> None:
    """Raise UsageError if a Loader's batch has a list that cannot become a tensor."""
    if isinstance(part, Mapping):
        for inner_name, inner in part.items():
            _refuse_lists(inner, inner_name)
    elif isinstance(part, tuple):
        for inner in part:
            _refuse_lists(inner)
    elif isinstance(part, JsonValues) or (isinstance(part, list) and not _is_rows(part)):
        what = "a result of the transform" if name is None else repr(name)
        raise UsageError(
            f"{what} is a list of {type(part[0]).__name__}, which cannot be a tensor: pad or crop its parts to one "
            "shape in the transform, or leave it out with the Loader's columns="
        )


def _map_parts(make: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with ``make(part)`` for each part, and tuples in place of lists of parts."""
    if isinstance(batch, Mapping):
        return {name: _map_parts(make, part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_parts(make, part) for part in batch))
    if isinstance(batch, tuple) or (isinstance(batch, list) and not _is_rows(batch)):
        return tuple(_map_parts(make, part) for part in batch)
    return make(batch)


def is_bytes_list(part: Any) -> bool:
    """Return whether a part is a list of bytes, such as a loader's encoded images."""
    return isinstance(part, list) and all(isinstance(x, bytes | bytearray | memoryview) for x in part)


def _is_rows(part: list[Any]) -> bool:
    """Return whether a list is a single part with one row (bytes, string or number) per element."""
    return is_bytes_list(part) or all(isinstance(x, str | int | float | complex | np.generic) for x in part)


def _spec_of(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(part)
    if tf.is_tensor(part):
        return tf.TensorSpec([None, *part.shape[1:]] if part.shape.rank else part.shape, part.dtype)
    if is_bytes_list(part):
        return tf.TensorSpec([None], tf.string)
    array = to_unmasked_array(part)
    dtype = None if array.dtype.hasobject or array.dtype.fields is not None else _tf_dtype(array.dtype)
    if dtype is None:
        raise UsageError(
            f"a part of the first batch is {type(part).__name__} of dtype {array.dtype}, which cannot be a tensor; turn "
            "it into an array of numbers, or a list of bytes or text"
        )
    return tf.TensorSpec([None, *array.shape[1:]] if array.ndim else [], dtype)


def _tf_dtype(dtype: Any) -> Any:
    """Return TensorFlow's name of a dtype, None if it has none."""
    try:
        return tf.as_dtype(dtype)
    except TypeError:
        return None


def flatten(signature: Any) -> list[Any]:
    """Return the leaves of a signature. Raises UsageError for anything but a ``tf.TensorSpec``."""
    leaves = leaves_of(signature, signature)
    for spec in leaves:
        if not isinstance(spec, tf.TensorSpec):
            raise UsageError(f"a signature consists of dense tf.TensorSpec in tuples and dicts, not {spec!r}")
    return leaves


def unflatten(signature: Any, values: list[Any]) -> Any:
    """Return ``values`` in the signature's form: the inverse of :func:`leaves_of`."""
    remaining = iter(values)
    return _map_parts(lambda _: next(remaining), signature)


def capacity_of(passes: Passes, capacity: int | str | None, element_spec: Any, *, waits: bool = True) -> int:
    """Return the capacity in batches: the given number, or a size divided by a batch's, at least 1.

    The batch size comes from the source, the signature or, if this ``waits`` for it, the first batch.
    """
    if capacity is None:
        return DEFAULT_CAPACITY
    if isinstance(capacity, str):
        size = _batch_bytes(passes, element_spec, waits=waits)
        return max(1, byte_count(capacity, of="a capacity") // max(1, size))
    return check_int(capacity, "a capacity, without a unit such as MiB,", least=1)


def _batch_bytes(passes: Passes, element_spec: Any, *, waits: bool) -> int:
    if (size := getattr(passes.source, "batch_bytes", None)) is not None:
        return int(size)
    specs = flatten(element_spec)
    if all(spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in specs):
        return int(sum(math.prod(spec.shape) * spec.dtype.size for spec in specs))
    if not waits:
        raise UsageError("a capacity in bytes needs a signature of fixed size; give a number of batches")
    parts = leaves_of(element_spec, _first_batch(passes))
    return sum(sum(map(len, part)) if is_bytes_list(part) else np.asarray(part).nbytes for part in parts)


def tensor_of(part: Any, spec: Any, *, zero_copy: bool) -> Any:
    """Return a part as an eager tensor. Raises UsageError if it does not match ``spec``."""
    if tf.is_tensor(part):
        return _check_part(part, spec)
    array = array_of(part, spec, zero_copy=zero_copy)
    if array.dtype.kind in NUMBERS:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array, spec.dtype)


def array_of(part: Any, spec: Any, *, zero_copy: bool) -> npt.NDArray[Any]:
    """Return a part as an array for TensorFlow. Raises UsageError if it does not match ``spec``."""
    if spec.dtype == tf.string:
        if isinstance(part, list | tuple):
            buffers = bytearray | memoryview | np.ndarray
            strings = np.fromiter((bytes(x) if isinstance(x, buffers) else x for x in part), object)
        else:
            strings = np.asarray(part, object)
        if wrong := [x for x in strings.flat if not isinstance(x, str | bytes)]:
            raise UsageError(
                f"a batch has {_describe(wrong[0])} where its signature says string; fix it or the signature"
            )
        return _check_part(strings, spec)  # type: ignore[no-any-return]
    try:
        array = to_unmasked_array(part)
    except ValueError as error:
        raise UsageError(
            f"a batch has {_describe(part)} that is not an array ({error}) where its signature says "
            f"{spec.dtype.name} {spec.shape}; pad or crop its rows to one shape, or fix the signature"
        ) from error
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if array.dtype != dtype and array.dtype.kind in "iufb" and not isinstance(part, np.ndarray):
        # Python numbers, which have no width
        numbers, array = array, array.astype(dtype)
        if not np.array_equal(array, numbers) and not (numbers.dtype.kind == dtype.kind == "f"):
            raise UsageError(
                f"a batch has numbers that are not {dtype.name}, as its signature says; fix it or the signature"
            )
    _check_part(array, spec)
    is_usable = array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative
    is_shared = zero_copy and is_usable and array.ctypes.data % ALIGNMENT == 0
    if is_shared or array.dtype.kind not in NUMBERS:
        return array
    fresh = allocate_aligned(array.nbytes).view(array.dtype.newbyteorder("=")).reshape(array.shape)
    fresh[...] = array
    return fresh


def empty_tensors(specs: Sequence[Any]) -> list[Any]:
    """Return empty tensors of these dtypes, for an element without a batch."""
    return list(map(_empty_tensor, specs))


def _empty_tensor(spec: Any) -> Any:
    fill = b"" if spec.dtype == tf.string else 0  # tf.zeros knows fewer dtypes
    return tf.constant(np.full([0] * (spec.shape.rank or 0), fill, spec.dtype.as_numpy_dtype))


def _check_part(value: Any, spec: Any) -> Any:
    dtype = (_tf_dtype(value.dtype) or value.dtype).name
    if dtype != spec.dtype.name or not spec.shape.is_compatible_with(value.shape):
        remedy = "with None where sizes differ" if dtype == spec.dtype.name else f"of {dtype}"
        raise UsageError(
            f"a batch has {dtype} {list(value.shape)} where its signature, by default that of the first batch, says "
            f"{spec.dtype.name} {spec.shape}; fix it, or give a signature= {remedy}"
        )
    return value


def make_leaves(convert: Callable[..., Any], element_spec: Any, batch: Any, *, zero_copy: bool) -> Leaves:
    """Return the leaves of a batch, each converted by :func:`tensor_of` or :func:`array_of`."""
    leaves = []
    for name, spec, part in list(_walk(element_spec, batch)):
        try:
            leaves.append(convert(part, spec, zero_copy=zero_copy))
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}" if name else error.message) from error
    return leaves
