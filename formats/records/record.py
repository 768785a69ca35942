"""A record: one stored image with its label and key, its checksums, and the stored order of records."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import printable

MAX_KEY_BYTES = 1024
CONTENT_DOMAIN = b"shardprep-record-1\0"

if google_crc32c.implementation == "python":  # pragma: no cover - needs a platform without a wheel
    raise ImportError(
        "google-crc32c has no compiled module on this platform, which would make every read "
        "a thousand times slower; install a wheel of it, or libcrc32c and its headers"
    )

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
MAX_IMAGE_BYTES = 64 << 20  # one ILSVRC12 image is 110 KB on average, the largest is about 15 MB


class RecordBatch(NamedTuple):
    """What torch's ``default_collate`` makes of records: encoded images, and a tensor of labels."""

    image: Any
    label: Any


class _RecordFields(NamedTuple):
    key: str
    label: int
    image: bytes


class Record(_RecordFields):
    """One image: its ``key``, its ``label`` (-1 for none) and ``image``, its encoded bytes unchanged.

    Notebooks show the picture; the ``repr`` has the image's size and not its bytes. A batch of records that
    PyTorch's DataLoader collates is (images, labels).
    """

    __slots__ = ()

    def __new__(cls, key: str, label: int, image: bytes) -> Self:
        """Return the record; of the columns of a batch, as ``default_collate`` gives them, a RecordBatch."""
        if not isinstance(key, str):
            return RecordBatch(image, label)
        return tuple.__new__(cls, (key, label, image))

    @property
    def crop_ready(self) -> bool:
        """Whether the image has a table of segments that the conversion of its dataset has checked."""
        return False

    @property
    def columns(self) -> Mapping[str, Any]:
        """The values of the dataset's columns, by name; empty without any."""
        return NO_COLUMNS

    def __repr__(self) -> str:
        return f"<Record {printable(self.key)!r}: label {self.label}, {len(self.image):,} bytes>"

    def _repr_html_(self) -> str:
        # Only notebooks need OpenCV for this; readers of records do without it.
        from shardprep.formats.images.pictures import figure

        return figure(self.image, caption=repr(self))


class CropReadyRecord(Record):
    """A record with an image whose crops are decoded without the rest of it."""

    __slots__ = ()

    @property
    def crop_ready(self) -> bool:
        return True


def record_crc(key: bytes, label: int, image: bytes | npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32C (Castagnoli, as in RFC 3720) over key, label and image.

    The key's length and the label come first as ``<Hi``, so that a swapped record is found, too.
    """
    head: int = google_crc32c.value(struct.pack("<Hi", len(key), label) + key)
    crc: int = google_crc32c.extend(head, image)
    return crc


def content_digest(key: bytes, label: int, image: bytes) -> bytes:
    """Return 32 bytes that identify a record's content, independent of container and shard (BLAKE3).

    BLAKE3 takes a third of the time of SHA-256, and each image is hashed once more for this.
    """
    head = CONTENT_DOMAIN + struct.pack("<IiQ", len(key), label, len(image)) + key
    return blake3(head).update(image).digest()


def content_root(digests: Iterable[bytes]) -> str:
    """Return ``blake3:<hex>`` over the records' digests in stored order, given in pieces of any size.

    Equal order, keys, labels and images give an equal root, for any container and shard size.
    """
    root = blake3(b"shardprep-content-1\0")
    for piece in digests:
        root.update(piece)
    return f"blake3:{root.hexdigest()}"


ORDERS = ("shuffled", "key")
GIVEN = "given"  # of items that were saved: as they were given
GIVEN_SHUFFLED = "given-shuffled"  # as they were given, shuffled by the seed
ITEM_ORDERS = (GIVEN, GIVEN_SHUFFLED)
ARCHIVE_ORDER = "archive"  # of images that stay in their archive

MAX_SEED = (1 << 64) - 1


def permutation(count: int, seed: int) -> npt.NDArray[np.intp]:
    """Return a uniform permutation of ``range(count)``: the sorting order of Philox's raw 64-bit stream.

    numpy guarantees the raw stream of Philox (Salmon et al. 2011), while the algorithm of
    ``Generator.permutation`` may change.
    """
    stream = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(stream, kind="stable")


def is_class_sorted(labels: npt.NDArray[np.int32]) -> bool:
    """Whether each class is one run of records, which trains badly when read in stored order."""
    runs = 1 + int(np.count_nonzero(np.diff(labels)))
    classes = len(np.unique(labels))
    return classes > 1 and runs == classes
