"""A tf.train.Example: named features, each a list of bytes, floats or integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .wire import FIXED32, LENGTH, MAX_VARINT, VARINT, ByteWindow, WireField, integers, parts, varint

BYTES, FLOATS, INTEGERS = "bytes", "floats", "integers"
MAX_FEATURES = 256
MAX_NAME_BYTES = 256
MAX_VALUES = 1 << 20  # of one list, where numbers are not packed

_KINDS = {1: BYTES, 2: FLOATS, 3: INTEGERS}


class Feature(NamedTuple):
    """The place of a feature's list; ``kind`` is "" for a feature that was never set."""

    kind: str
    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        """Whether the list has no values."""
        return self.start == self.end


NONE = Feature("", 0, 0)


def there(found: Mapping[str, Feature], name: str) -> Feature:
    """Return the feature of that name. Raises ValueError if it is not there."""
    if name not in found:
        raise ValueError(f"it lacks the feature {name!r}, which the first record has")
    return found[name]


def bounded(feature: Feature, most: int) -> Feature:
    """Return the feature. Raises ValueError if its list has more bytes than ``most``."""
    if feature.end - feature.start > most:
        raise ValueError(f"a list of {feature.end - feature.start} bytes is too long for what it holds")
    return feature


def features(window: ByteWindow, start: int, end: int) -> dict[str, Feature]:
    """Return the features of the example between two offsets. Raises ValueError for anything else."""
    found: dict[str, Feature] = {}
    for example in parts(window, start, end):
        if example.number != 1 or example.kind != LENGTH:
            raise ValueError("the record is no tf.train.Example")
        for entry in parts(window, example.start, example.end):
            name, feature = _named(window, entry)
            if name in found or len(found) == MAX_FEATURES:
                raise ValueError(f"the feature {name!r} is there twice, or one more than {MAX_FEATURES}")
            found[name] = feature
    return found


def _named(window: ByteWindow, entry: WireField) -> tuple[str, Feature]:
    if entry.number != 1 or entry.kind != LENGTH:
        raise ValueError("the record is no tf.train.Example")
    name, feature = "", Feature("", entry.end, entry.end)
    for part in parts(window, entry.start, entry.end):
        if part.kind != LENGTH or part.number not in (1, 2):
            raise ValueError("a feature has something else than a name and a value")
        if part.number == 2:
            feature = _feature(window, part)
        elif part.end - part.start > MAX_NAME_BYTES:
            raise ValueError(f"the name of a feature has {part.end - part.start} bytes")
        else:
            name = window.take(part.start, part.end).decode()
    return name, feature


def _feature(window: ByteWindow, whole: WireField) -> Feature:
    found = Feature("", whole.end, whole.end)
    for part in parts(window, whole.start, whole.end):
        if part.kind != LENGTH or part.number not in _KINDS or found.kind:
            raise ValueError("a feature is not one list of bytes, floats or integers")
        found = Feature(_KINDS[part.number], part.start, part.end)
    return found


def is_single(window: ByteWindow, feature: Feature) -> bool:
    """Whether the list has exactly one value; a long list is not read. Raises ValueError."""
    first = next(_values(window, feature), None)
    if first is None or first.end != feature.end:
        return False
    if feature.kind == FLOATS:
        return first.end - first.start == 4
    if feature.kind == INTEGERS:
        number = window.take(first.start, min(first.end, first.start + MAX_VARINT))
        return bool(number) and first.start + varint(number, 0)[1] == first.end
    return True


def _check_kind(feature: Feature, kind: str) -> None:
    """Raise ValueError for a list of another kind; an empty one is of any."""
    if feature.kind != kind and not feature.is_empty:
        raise ValueError(f"a feature has {feature.kind}, not {kind}")


def byte_values(window: ByteWindow, feature: Feature) -> Iterator[WireField]:
    """Yield the places of the values of a list of bytes. Raises ValueError for other lists."""
    _check_kind(feature, BYTES)
    for value in _values(window, feature):
        if value.kind != LENGTH:
            raise ValueError("has something else than bytes in its list")
        yield value


def float_values(window: ByteWindow, feature: Feature) -> npt.NDArray[np.float32]:
    """Return a list of floats, float32 [n]. Raises ValueError for other lists."""
    _check_kind(feature, FLOATS)
    data = bytearray()
    for value in _values(window, feature):
        if value.kind not in (LENGTH, FIXED32) or (value.end - value.start) % 4:
            raise ValueError("has something else than floats in its list")
        data += window.take(value.start, value.end)
    return np.frombuffer(bytes(data), "<f4").astype(np.float32, copy=False)


def integer_values(window: ByteWindow, feature: Feature) -> npt.NDArray[np.int64]:
    """Return a list of integers, int64 [n]. Raises ValueError for other lists."""
    _check_kind(feature, INTEGERS)
    data = bytearray()
    for value in _values(window, feature):
        if value.kind not in (LENGTH, VARINT):
            raise ValueError("has something else than integers in its list")
        data += window.take(value.start, value.end)
    return integers(bytes(data))


def _values(window: ByteWindow, feature: Feature) -> Iterator[WireField]:
    """Yield the parts of a list: numbers are packed into one of them, or each has its own."""
    for count, value in enumerate(parts(window, feature.start, feature.end)):
        if value.number != 1 or count == MAX_VALUES:
            raise ValueError(f"a list has a field that it should not have, or more than {MAX_VALUES} of them")
        yield value
