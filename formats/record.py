"""A record: what is stored of one image, and the checksums that hold it together."""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from blake3 import blake3

MAX_KEY_BYTES = 1024
CONTENT_DOMAIN = b"shardprep-record-1\0"

if google_crc32c.implementation == "python":  # pragma: no cover - needs a platform without a wheel
    raise ImportError(
        "google-crc32c has no compiled module on this platform, which would make every read "
        "a thousand times slower; install a wheel of it, or libcrc32c and its headers"
    )


class Record(NamedTuple):
    """One labelled image: its key, its label (-1 for none) and its encoded bytes as they came."""

    key: str
    label: int
    image: bytes


def record_crc(key: bytes, label: int, image: bytes | npt.NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli, as in RFC 3720) over key, label and image.

    The key's length and the label go before as ``<Hi``, so that a swapped record, too, is found.
    """
    head: int = google_crc32c.value(struct.pack("<Hi", len(key), label) + key)
    crc: int = google_crc32c.extend(head, image)
    return crc


def content_digest(key: bytes, label: int, image: bytes) -> bytes:
    """32 bytes that name a record's content, independent of container and shard (BLAKE3).

    BLAKE3 and not SHA-256: each image is hashed once more for this, at a third of the cost.
    """
    head = CONTENT_DOMAIN + struct.pack("<IiQ", len(key), label, len(image)) + key
    return blake3(head).update(image).digest()
