"""The boxes that JPEG 2000 and AVIF files are made of (ISO/IEC 14496-12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardprep.formats.errors import BadImage

from .image_info import numbers, truncated

MAX_BOXES = 10_000  # side by side; photographs have some dozens


class FileBox(NamedTuple):
    """A box: its kind, and where its content starts and stops."""

    kind: bytes
    start: int
    stop: int


def boxes_in(image: bytes, start: int, stop: int, of: str) -> Iterator[FileBox]:
    """Yield the boxes between two places, side by side; ``of`` is the kind of file for errors.

    Raises BadImage at a box that does not fit, or after MAX_BOXES.
    """
    for _ in range(MAX_BOXES):
        if start == stop:
            return
        box = _box_at(image, start, stop, of)
        if box.stop > stop:
            raise truncated(of)
        yield box
        start = box.stop
    raise BadImage(f"{of} of more than {MAX_BOXES} boxes")


def _box_at(image: bytes, at: int, stop: int, of: str) -> FileBox:
    size, kind = numbers(">I4s", image, at, of)
    start = at + 8
    if size == 1:
        (size,) = numbers(">Q", image, start, of)
        start += 8
    end = stop if size == 0 else at + size
    if end < start:
        raise BadImage(f"{of} with a box at byte {at} that is too short")
    return FileBox(kind, start, end)


def content(image: bytes, boxes: dict[bytes, FileBox], kind: bytes, of: str) -> bytes:
    """Return the content of a box that must be there. Raises BadImage."""
    box = boxes.get(kind)
    if box is None:
        raise BadImage(f"{of} without the box {kind.decode()!r}")
    return image[box.start : box.stop]
