"""Sources of records with columns: written for tests, and read whole."""

import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardprep.formats.records.record import official_words
from shardprep.formats.sources.source import Listing
from shardprep.formats.sources.tfrecord import masked_crc
from support.image_files import encoded, pixels
from support.source_builders import tar_of, write

IMAGES = [encoded(pixels(3 + n, 20 - n, 3)) for n in range(12)]
WNIDS = list(official_words())


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write a shard of WebDataset: the parts of each sample by its stem."""
    members = [(f"{stem}.{part}", data) for stem, parts in samples.items() for part, data in parts.items()]
    write(path, tar_of(members, style=tarfile.USTAR_FORMAT))
    return path


def records(listing: Listing) -> dict[str, dict[str, Any]]:
    """The label, the image and the decoded columns by key."""
    found = {}
    with listing.reader.open() as reader:
        for entry in listing.entries:
            columns = decoded(listing, reader.values(entry))
            image = {"image": reader.read(entry)} if listing.has_images else {}
            found[entry["key"].decode()] = {"label": int(entry["label"]), **image, **columns}
    return found


def decoded(listing: Listing, values: Iterable[bytes]) -> dict[str, Any]:
    return {
        field.name: field.codec.decode(value) for field, value in zip(listing.schema, values, strict=True)
    }


Feature = bytes | int | float | list[bytes] | list[int] | list[float]


def varint(number: int) -> bytes:
    """A number as protocol buffers have it; negative ones have 64 bits."""
    number %= 1 << 64
    pieces = []
    while number > 0x7F:
        pieces.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*pieces, number])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: Mapping[str, Feature]) -> bytes:
    """A tf.train.Example, with the features in this order."""
    return message(1, b"".join(message(1, _entry(name, value)) for name, value in features.items()))


def _entry(name: str, value: Feature) -> bytes:
    values = value if isinstance(value, list) else [value]
    if not values:
        return message(1, name.encode()) + message(2, b"")
    match values[0]:
        case bytes():
            feature = message(1, b"".join(message(1, each) for each in values))  # type: ignore[arg-type]
        case float():
            feature = message(2, message(1, struct.pack(f"<{len(values)}f", *values)))
        case _:
            feature = message(3, message(1, b"".join(varint(each) for each in values)))  # type: ignore[arg-type]
    return message(1, name.encode()) + message(2, feature)


def frame(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def write_tfrecord(path: Path, examples: Iterable[Mapping[str, Feature]]) -> Path:
    write(path, b"".join(frame(example(each)) for each in examples))
    return path


def official(number: int, label: int, boxes: int = 0) -> dict[str, Feature]:
    """A record as the official scripts for ImageNet write it, in another order of its features."""
    corners = [0.1 * (box + 1) for box in range(boxes)]
    return {
        "image/object/bbox/xmin": corners,
        "image/object/bbox/xmax": [corner + 0.25 for corner in corners],
        "image/object/bbox/ymin": corners,
        "image/object/bbox/ymax": [1.0 for _ in corners],
        "image/object/bbox/label": [label + 1 for _ in corners],
        "image/encoded": IMAGES[number],
        "image/height": 3 + number,
        "image/format": b"JPEG",
        "image/class/label": label + 1,
        "image/class/synset": WNIDS[label].encode(),
        "image/class/text": b"words",
        "image/filename": f"{WNIDS[label]}_{number}.JPEG".encode(),
    }


def tfds(number: int, **more: Feature) -> dict[str, Feature]:
    return {"image": IMAGES[number], "label": number, "file_name": f"{number}.jpeg".encode(), **more}
