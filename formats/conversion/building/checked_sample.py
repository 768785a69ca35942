"""A sample of a source, read and checked: its record, its image's properties and its columns' values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardprep.formats.containers.container import Stored
from shardprep.formats.images.crop_ready.transcoding import stored_image
from shardprep.formats.images.decode_check import check_decodes
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import NO_IMAGE, ImageInfo
from shardprep.formats.records.record import record_crc
from shardprep.formats.sources.listing.source import ByteReader

from .plan import PlanOptions


class CheckedSample(NamedTuple):
    """A record to store, the properties of its image, the encoded values of its columns, and its offset."""

    stored: Stored
    info: ImageInfo
    values: tuple[bytes, ...]
    offset: int


def checked_sample(
    reader: ByteReader, entry: np.void, options: PlanOptions, *, has_images: bool
) -> CheckedSample:
    """Read a sample of a source, and make of its image what the options ask for.

    Raises BadImage, BadValue, SourceDamaged, OperationError and OSError.
    """
    image, info = _image(reader.read(entry), options) if has_images else (b"", NO_IMAGE)
    key, label = entry["key"].item(), int(entry["label"])
    stored = Stored(key, label, record_crc(key, label, image), image)
    return CheckedSample(stored, info, reader.values(entry), int(entry["offset"]))


def _image(image: bytes, options: PlanOptions) -> tuple[bytes, ImageInfo]:
    info = read_image_header(image)
    if options.decode_check:
        check_decodes(image)
    return stored_image(
        image,
        info,
        segments=options.crop_ready,
        shorter_side=options.shorter_side,
        quality=options.quality,
    )
