"""Images as HTML for notebooks: one, or several side by side."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardprep.formats.errors import BadImage, printable
from shardprep.formats.images.header import ImageFlag, kind_of, read_image_header

MEDIA_TYPES = {"JPEG": "jpeg", "PNG": "png", "WebP": "webp", "GIF": "gif", "AVIF": "avif"}
"""The media types of the kinds that browsers show."""


# The limits of a picture in a page: the file's bytes, the pixels of a side, and the displayed height.
WHOLE = (1 << 20, 768, 256)
THUMBNAIL = (128 << 10, 384, 160)


def figure(image: bytes, *, caption: str, limits: tuple[int, int, int] = WHOLE) -> str:
    """Return an HTML figure of the image, with the text ``caption`` below.

    A file of one frame that browsers show is embedded unchanged if it is within the ``limits``, anything else
    as a JPEG, shrunk to the limits. EXIF orientation is not applied. Without an image there is only the
    caption, which also says if the image does not decode.
    """
    (most_bytes, most_side, most_height), text, kind = limits, html.escape(caption), None
    if not image:
        return f"<figure><figcaption>{text}</figcaption></figure>"
    if len(image) <= most_bytes:
        with suppress(BadImage):
            flags = read_image_header(image).flags
            kind = None if flags & ImageFlag.SEVERAL else MEDIA_TYPES.get(kind_of(flags))
    try:
        shown = image if kind else _shrink(image, most_side)
    except BadImage:
        return f"<figure><figcaption>{text}: this image does not decode</figcaption></figure>"
    source = f"data:image/{kind or 'jpeg'};base64,{base64.b64encode(shown).decode()}"
    style = f"max-width: 100%; max-height: {most_height}px; image-orientation: none"
    return f'<figure><img alt="" style="{style}" src="{source}"><figcaption>{text}</figcaption></figure>'


def _shrink(image: bytes, most_side: int) -> bytes:
    """Return a JPEG file of at most ``most_side`` pixels a side. Raises BadImage."""
    from shardprep.formats.images.decode import cv2, decode  # start-up time: OpenCV

    pixels = decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    height, width = pixels.shape[:2]
    scale = min(1.0, most_side / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return bytes(cv2.imencode(".jpg", cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))[1])


MAX_SHOWN = 100  # images; each may take the bytes of a THUMBNAIL in the page
MAX_IN_CAPTION = 60  # characters


@dataclass(frozen=True)
class ShownImage:
    """An encoded image with the text below it."""

    image: bytes
    caption: str

    @property
    def line(self) -> str:
        """The caption, and the image's size in pixels, kind and bytes."""
        form = "unreadable" if self.image else "without an image"
        with suppress(BadImage):
            info = read_image_header(self.image)
            form = f"{info.width}x{info.height} {kind_of(info.flags)}"
        size = f", {len(self.image):,} bytes" if self.image else ""
        return f"{printable(self.caption, MAX_IN_CAPTION)}  {form}{size}"


@dataclass(frozen=True, repr=False)
class Gallery:
    """Images below a title: side by side in a notebook, and one per line in a terminal."""

    title: str
    images: Sequence[ShownImage]

    def __repr__(self) -> str:
        return "\n".join((printable(self.title), *(f"  {each.line}" for each in self.images)))

    def __len__(self) -> int:
        return len(self.images)

    def _repr_html_(self) -> str:
        shown = "".join(
            figure(each.image, caption=printable(each.caption, MAX_IN_CAPTION), limits=THUMBNAIL)
            for each in self.images
        )
        columns = "repeat(auto-fill, minmax(10em, 1fr)); overflow-wrap: anywhere"
        style = f"display: grid; grid-template-columns: {columns}; gap: 0.5em; align-items: end"
        return f'<div>{html.escape(printable(self.title))}</div><div style="{style}">{shown}</div>'
