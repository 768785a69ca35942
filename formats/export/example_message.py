"""Messages of TensorFlow's ``tf.train.Example``, and the records of TFRecord files."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import google_crc32c
import numpy as np

Feature = bytes
"""An encoded ``tf.train.Feature``."""

# Keys of protocol buffers: the number of a field, and that a length follows.
_FIRST, _SECOND, _THIRD = (number << 3 | 2 for number in (1, 2, 3))
_MASK_DELTA = 0xA282EAD8


def varint(number: int) -> bytes:
    """Return an unsigned number of up to 64 bits, seven bits a byte, the lowest first."""
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _field(key: int, data: bytes) -> bytes:
    return bytes([key]) + varint(len(data)) + data


def bytes_feature(*values: bytes) -> Feature:
    """Return a feature of bytes."""
    return _field(_FIRST, b"".join(_field(_FIRST, value) for value in values))


def float_feature(values: Iterable[float]) -> Feature:
    """Return a feature of floats, rounded to 32 bits."""
    return _field(_SECOND, _field(_FIRST, np.asarray([*values], "<f4").tobytes()))


def int_feature(values: Iterable[int]) -> Feature:
    """Return a feature of integers of 64 bits."""
    return _field(_THIRD, _field(_FIRST, b"".join(varint(value & 0xFFFF_FFFF_FFFF_FFFF) for value in values)))


def example(features: Mapping[str, Feature]) -> bytes:
    """Return the message of these features, in the order of their names."""
    entries = (_field(_FIRST, name.encode()) + _field(_SECOND, features[name]) for name in sorted(features))
    return _field(_FIRST, b"".join(_field(_FIRST, entry) for entry in entries))


def framed(message: bytes) -> bytes:
    """Return the record of a TFRecord file: length, message, and the masked CRC-32C of each."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFF_FFFF)
