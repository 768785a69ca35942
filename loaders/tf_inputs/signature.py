"""What a source's batches are in TensorFlow's terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ..passes import Passes
from ..sizes import byte_count
from .framework import tf
from .structure import leaves_of, packed

DEFAULT_CAPACITY = 2


def signature_of(passes: Passes, given: Any = None) -> Any:
    """The ``tf.TensorSpec`` of each part of a batch: as given, as the source knows, or as its first batch is.

    What is taken from a first batch leaves the number of rows open, as the last batch may have fewer.
    Raises UsageError where nothing can be known.
    """
    if given is not None:
        return _checked(given)
    element_spec = getattr(passes.source, "element_spec", None)
    if element_spec is not None:
        return element_spec
    specs = getattr(passes.source, "batch_specs", None)
    if specs is not None:
        return tuple(tf.TensorSpec(s.shape, s.dtype or tf.string, name=s.name) for s in specs)
    return _inferred(passes.peek())


def _checked(given: Any) -> Any:
    for spec in flat(given):
        if not isinstance(spec, tf.TensorSpec):
            raise UsageError(f"a signature consists of tf.TensorSpec, in tuples and dicts, not {spec!r}")
    return given


def _inferred(batch: Any) -> Any:
    return _mapped(_spec_of, batch)


def _mapped(make: Callable[[Any], Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: _mapped(make, part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(make, part) for part in batch))
    if isinstance(batch, tuple) or (isinstance(batch, list) and not _is_rows(batch)):
        return tuple(_mapped(make, part) for part in batch)
    return make(batch)


def is_bytes_list(part: Any) -> bool:
    """Whether it is what a loader delivers for encoded images."""
    return isinstance(part, list) and all(isinstance(x, bytes | bytearray | memoryview) for x in part)


def _is_rows(part: list[Any]) -> bool:
    """Whether a list is one part with as many rows: of bytes, words or numbers, as a Flow's ``as_list`` has them."""
    return is_bytes_list(part) or all(isinstance(x, str | int | float | complex | np.generic) for x in part)


def _spec_of(part: Any) -> Any:
    if tf.is_tensor(part):
        return tf.TensorSpec([None, *part.shape[1:]] if part.shape.rank else part.shape, part.dtype)
    if is_bytes_list(part):
        return tf.TensorSpec([None], tf.string)
    array = np.asarray(part)
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise UsageError(f"a part of the first batch is {type(part).__name__}, no array; give a signature")
    return tf.TensorSpec([None, *array.shape[1:]] if array.ndim else [], tf.as_dtype(array.dtype))


def flat(signature: Any) -> list[Any]:
    """The leaves of a signature."""
    return leaves_of(signature, signature)


def renamed(signature: Any, values: list[Any]) -> Any:
    """``values`` in the signature's form."""
    return packed(signature, iter(values))


def capacity_of(passes: Passes, capacity: int | str | None, element_spec: Any) -> int:
    """Batches that a queue holds: as many as asked for, or as full batches fit into so many bytes; at least 1."""
    if capacity is None:
        return DEFAULT_CAPACITY
    if isinstance(capacity, str):
        return max(1, byte_count(capacity, of="a capacity") // max(1, _batch_bytes(passes, element_spec)))
    if isinstance(capacity, bool) or not hasattr(capacity, "__index__") or capacity < 1:
        raise UsageError(
            f"a capacity is a number of batches from 1 on, or a size as '512MiB', not {capacity!r}"
        )
    return int(capacity)


def _batch_bytes(passes: Passes, element_spec: Any) -> int:
    """As the source knows, or the signature says, or as its first batch has."""
    known = getattr(passes.source, "batch_bytes", None)
    if known is None:
        known = fixed_bytes(element_spec)
    if known is not None:
        return int(known)
    return sum(_nbytes(part) for part in leaves_of(element_spec, passes.peek()))


def fixed_bytes(element_spec: Any) -> int | None:
    """The bytes of a batch; None where the signature leaves them open."""
    specs = flat(element_spec)
    if not all(spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in specs):
        return None
    return int(sum(math.prod(spec.shape) * spec.dtype.size for spec in specs))


def _nbytes(part: Any) -> int:
    if is_bytes_list(part):
        return sum(memoryview(x).nbytes for x in part)
    return int(np.asarray(part).nbytes)
