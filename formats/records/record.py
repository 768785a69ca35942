"""Records: one stored image with its label and key, their checksums, and their stored order."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import UsageError, printable

MAX_KEY_BYTES = 1024
CRC_RESIDUE = 0x48674BC7  # the CRC-32C of any bytes that end in their own CRC-32C, as "<u4"

if google_crc32c.implementation == "python":  # pragma: no cover - needs a platform without a wheel
    raise ImportError(
        "google-crc32c has no compiled module on this platform, which would make every read a thousand times "
        "slower; install a wheel of it, or libcrc32c and its headers"
    )

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
MAX_IMAGE_BYTES = 64 << 20  # one ILSVRC12 image is 110 KB on average, the largest is about 15 MB


class RecordBatch(NamedTuple):
    """Records collated by torch's ``default_collate``: encoded images, and a tensor of labels."""

    image: Any
    label: Any


class _RecordFields(NamedTuple):
    key: str
    label: int
    image: bytes


class Record(_RecordFields):
    """One image: its ``key``, its ``label`` (-1 for none) and its unchanged encoded bytes, ``image``.

    Notebooks show the picture; the ``repr`` has the image's size instead of its bytes. PyTorch's DataLoader
    collates records to (images, labels).
    """

    __slots__ = ()

    def __new__(cls, key: str, label: int, image: bytes) -> Self:
        """Return the record, or a RecordBatch if ``default_collate`` passes the columns of a batch."""
        if not isinstance(key, str):
            return RecordBatch(image, label)
        return tuple.__new__(cls, (key, label, image))

    @property
    def crop_ready(self) -> bool:
        """Whether the image has a table of segments that the conversion checked."""
        return False

    @property
    def columns(self) -> Mapping[str, Any]:
        """The values of the dataset's columns by name."""
        return NO_COLUMNS

    def __repr__(self) -> str:
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        return f"<Record {printable(self.key)!r}: label {self.label}, {len(self.image):,} bytes{columns}>"

    def _repr_html_(self) -> str:
        from shardprep.formats.images.pictures import figure  # start-up time: OpenCV

        return figure(self.image, caption=repr(self))


class CropReadyRecord(Record):
    """A record whose image allows decoding only a crop."""

    __slots__ = ()

    @property
    def crop_ready(self) -> bool:
        return True


def check_transform(transform: object) -> None:
    """Raise UsageError unless this may be a transform of records; name the wrapper of one of images."""
    library = type(transform).__module__.partition(".")[0]
    if library in ("torchvision", "albumentations"):
        raise UsageError(
            f"transform must take a record, but a {type(transform).__name__} of {library} takes an image: give "
            f"{library.capitalize()}(transform), from shardprep.loaders.transforms.{library}"
        )
    if isinstance(transform, type) or not callable(transform):
        raise UsageError(
            f"transform must be a callable of a record, such as TrainTransform(224), not {transform!r}"
        )


def record_crc(key: bytes, label: int, image: bytes | npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32C (Castagnoli, as in RFC 3720) of key, label and image.

    The key's length and the label come first, as ``<Hi``, so that a swapped record is detected, too.
    """
    return google_crc32c.extend(head_crc(key, label), image)  # type: ignore[no-any-return]


def head_crc(key: bytes, label: int) -> int:
    """Return the CRC-32C of what :func:`record_crc` takes before the image."""
    return google_crc32c.value(struct.pack("<Hi", len(key), label) + key)  # type: ignore[no-any-return]


def end_in_crc(heads: Iterable[int], rows: Iterable[bytes]) -> bool:
    """Whether each row ends in the CRC-32C, as "<u4", of its :func:`head_crc` and its other bytes."""
    return set(map(google_crc32c.extend, heads, rows)) <= {CRC_RESIDUE}


def content_digest(key: bytes, label: int, image: bytes) -> bytes:
    """Return a digest of 32 bytes of a record's content, whatever its container and shard.

    It is BLAKE3, as each image is hashed once more for this, and SHA-256 takes three times as long.
    """
    head = b"shardprep-record-1\0" + struct.pack("<IiQ", len(key), label, len(image)) + key
    return blake3(head).update(image).digest()


def content_root(digests: Iterable[bytes]) -> str:
    """Return ``blake3:<hex>`` of the records' digests in stored order, given in pieces of any size.

    Equal order, keys, labels and images give equal roots for any container and shard size.
    """
    root = blake3(b"shardprep-content-1\0")
    for piece in digests:
        root.update(piece)
    return f"blake3:{root.hexdigest()}"


ORDERS = ("shuffled", "key")
GIVEN = "given"  # saved items, as they were given
GIVEN_SHUFFLED = "given-shuffled"  # saved items, shuffled by the seed
ITEM_ORDERS = (GIVEN, GIVEN_SHUFFLED)
ARCHIVE_ORDER = "archive"  # images that stay in their archive

MAX_SEED = (1 << 64) - 1


def permutation(count: int, seed: int) -> npt.NDArray[np.intp]:
    """Return a uniform permutation of ``range(count)``: the sorting order of Philox's raw 64-bit stream.

    NumPy guarantees the raw stream of Philox (Salmon et al. 2011), but may change ``Generator.permutation``.
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


def is_class_sorted(labels: npt.NDArray[np.int32]) -> bool:
    """Whether each class is one run of records: bad for training in stored order."""
    classes = len(np.unique(labels))
    return classes > 1 and classes == 1 + int(np.count_nonzero(np.diff(labels)))
