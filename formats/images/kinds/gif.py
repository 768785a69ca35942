"""A GIF by its blocks (GIF89a): its properties and its completeness."""

from __future__ import annotations

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo, numbers, truncated

SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_BLOCKS = 1 << 20  # with the parts of at most 255 bytes that data consists of
_IMAGE, _EXTENSION, _TRAILER = 0x2C, 0x21, 0x3B


def read_gif(image: bytes) -> ImageInfo:
    """Return the properties of a GIF. Raises BadImage unless it has an image and an end."""
    width, height, packed = numbers("<HHB", image, 6, "GIF")
    walk = _BlockWalk(image, 13 + _colours(packed))
    images = 0
    while (kind := walk.byte()) != _TRAILER:
        if kind == _IMAGE:
            images += 1
            walk.image(width, height)
        elif kind == _EXTENSION:
            walk.byte()
            walk.data()
        else:
            raise BadImage(f"a GIF with an unknown block at byte {walk.at - 1}")
    if not images:
        raise BadImage("a GIF without an image")
    flags = ImageFlag.GIF | (ImageFlag.SEVERAL if images > 1 else ImageFlag(0))
    if walk.at != len(image):
        flags |= ImageFlag.TRAILING_BYTES
    return ImageInfo(width, height, 3, flags)


def _colours(packed: int) -> int:
    """Return the number of bytes of the table of colours that such a field declares."""
    return 3 << (packed & 7) + 1 if packed & 0x80 else 0


class _BlockWalk:
    """A place that moves from block to block. Raises BadImage at the end of the file and after MAX_BLOCKS."""

    def __init__(self, image: bytes, at: int) -> None:
        self.at = at
        self._image = image
        self._left = MAX_BLOCKS

    def byte(self) -> int:
        self._left -= 1
        if self._left < 0:
            raise BadImage(f"a GIF of more than {MAX_BLOCKS} blocks")
        if self.at >= len(self._image):
            raise truncated("GIF")
        self.at += 1
        return self._image[self.at - 1]

    def image(self, width: int, height: int) -> None:
        """Skip an image, which must lie within the screen."""
        x, y, own_width, own_height, packed = numbers("<HHHHB", self._image, self.at, "GIF")
        if not own_width or not own_height or x + own_width > width or y + own_height > height:
            raise BadImage("a GIF with an image that does not fit its screen")
        self.at += 9 + _colours(packed) + 1
        self.data()

    def data(self) -> None:
        """Skip data in parts, the last of which is empty."""
        while length := self.byte():
            self.at += length
