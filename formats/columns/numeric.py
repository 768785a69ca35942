"""Values that are numbers: integers, floats, a label, and several labels."""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
import numpy.typing as npt

from .codec import BadValue, Codec, bounded, refused

INT64 = np.iinfo(np.int64)
LABEL = np.dtype("<i4")


@dataclass(frozen=True)
class IntegerCodec(Codec):
    """Whole numbers of 64 bits; numpy's become Python's."""

    dtype = np.dtype("<i8")

    def encode(self, value: Any) -> bytes:
        if not is_whole(value):
            raise refused(value, "an integer")
        number = operator.index(value)
        if not INT64.min <= number <= INT64.max:
            raise refused(value, "an integer of 64 bits")
        return number.to_bytes(8, "little", signed=True)

    def decode(self, data: bytes) -> int:
        return int.from_bytes(_sized(data, 8), "little", signed=True)


@dataclass(frozen=True)
class FloatCodec(Codec):
    """Floats of 64 bits, NaN and infinities included; integers are taken, too."""

    dtype = np.dtype("<f8")

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bool | np.bool_) or not isinstance(
            value, int | float | np.integer | np.floating
        ):
            raise refused(value, "a number")
        try:
            return struct.pack("<d", float(value))
        except OverflowError as error:
            raise refused(value, "a number that a float can hold") from error

    def decode(self, data: bytes) -> float:
        return float(np.frombuffer(_sized(data, 8), "<f8")[0])


@dataclass(frozen=True)
class LabelCodec(Codec):
    """One of ``classes``: given by name or number, -1 for none; read as a number."""

    classes: tuple[str, ...]
    dtype = LABEL

    def encode(self, value: Any) -> bytes:
        return number_of(value, self.classes, least=-1).to_bytes(4, "little", signed=True)

    def decode(self, data: bytes) -> int:
        label = int.from_bytes(_sized(data, 4), "little", signed=True)
        if not -1 <= label < len(self.classes):
            raise BadValue(f"has the label {label} of {len(self.classes)} classes")
        return label


@dataclass(frozen=True)
class LabelsCodec(Codec):
    """Any of ``classes``, each at most once: given by names or numbers; read as ascending int32 [n]."""

    classes: tuple[str, ...]

    def encode(self, value: Any) -> bytes:
        if isinstance(value, str | bytes | dict):
            raise refused(value, "several labels")
        try:
            numbers = sorted(number_of(each, self.classes) for each in value)
        except TypeError as error:
            raise refused(value, "several labels") from error
        if len(set(numbers)) != len(numbers):
            raise refused(value, "labels that differ")
        return bounded(np.array(numbers, LABEL).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[np.int32]:
        if len(data) % LABEL.itemsize:
            raise BadValue(f"has {len(data)} bytes, which are not labels")
        labels = np.frombuffer(data, LABEL)
        if len(labels) and (labels[0] < 0 or labels[-1] >= len(self.classes) or (np.diff(labels) <= 0).any()):
            raise BadValue(f"does not have ascending labels of {len(self.classes)} classes")
        return labels


def number_of(value: object, classes: tuple[str, ...], *, least: int = 0) -> int:
    """Return the number of a class that is given by name or number. Raises BadValue for any other."""
    if isinstance(value, str):
        try:
            return classes.index(value)
        except ValueError as error:
            raise refused(value, f"one of {len(classes)} classes") from error
    if not is_whole(value):
        raise refused(value, "a label")
    number = operator.index(value)
    if not least <= number < len(classes):
        raise refused(value, f"a label of {len(classes)} classes")
    return number


def is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """Whether the value is a whole number of Python or numpy, and no bool."""
    if type(value) is int:  # asked first: SupportsIndex takes 10 us
        return True
    return not isinstance(value, bool | np.bool_) and isinstance(value, SupportsIndex)


def _sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise BadValue(f"has {len(data)} bytes, not {size}")
    return data
