"""An encoded image as HTML, for notebooks."""

from __future__ import annotations

import base64
import html
from functools import reduce
from operator import or_

from shardprep.formats.errors import BadImage

from .decoder import decode
from .header import read_image_header
from .kinds.image_info import KINDS, ImageFlag
from .opencv import cv2

MEDIA_TYPES = {
    ImageFlag(0): "jpeg",
    ImageFlag.PNG: "png",
    ImageFlag.WEBP: "webp",
    ImageFlag.GIF: "gif",
    ImageFlag.AVIF: "avif",
}
"""The media type of the kinds that browsers show, by their flag."""
KIND = reduce(or_, KINDS.values()) | ImageFlag.SEVERAL
MAX_BYTES = 1 << 20  # of a file in a page; larger ones are made smaller
MAX_SIDE = 768  # pixels of what is made smaller
SHOWN_HEIGHT = 256  # pixels in the page


def figure(
    image: bytes,
    *,
    caption: str,
    most_bytes: int = MAX_BYTES,
    most_side: int = MAX_SIDE,
    height: int = SHOWN_HEIGHT,
) -> str:
    """Return an HTML figure with the image inside, and ``caption`` below it as text.

    A file of a kind that browsers show, of one frame and of up to ``most_bytes``, is included unchanged,
    anything else as a JPEG file of at most ``most_side`` pixels a side. It is shown up to ``height`` pixels
    high, as it is stored: EXIF's orientation is not applied. Where the image does not decode, the figure says
    so.
    """
    text = html.escape(caption)
    source = _data_uri(image, most_bytes, most_side)
    if source is None:
        return f"<figure><figcaption>{text}: this image does not decode</figcaption></figure>"
    style = f"max-width: 100%; max-height: {height}px; image-orientation: none"
    return f'<figure><img style="{style}" src="{source}"><figcaption>{text}</figcaption></figure>'


def _data_uri(image: bytes, most_bytes: int, most_side: int) -> str | None:
    kind = _shown_kind(image) if len(image) <= most_bytes else None
    shown = image if kind else _smaller(image, most_side)
    if shown is None:
        return None
    return f"data:image/{kind or 'jpeg'};base64,{base64.b64encode(shown).decode()}"


def _shown_kind(image: bytes) -> str | None:
    """The media type where a browser shows what the decoder returns; None for other kinds and animations."""
    try:
        return MEDIA_TYPES.get(read_image_header(image).flags & KIND)
    except BadImage:
        return None


def _smaller(image: bytes, most_side: int) -> bytes | None:
    """Return a JPEG file of at most ``most_side`` pixels a side; None for what does not decode."""
    try:
        pixels = decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except BadImage:
        return None
    height, width = pixels.shape[:2]
    scale = min(1.0, most_side / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return bytes(cv2.imencode(".jpg", resized)[1])
