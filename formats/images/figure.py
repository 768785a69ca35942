"""An encoded image as HTML, for notebooks."""

from __future__ import annotations

import base64
import html

import numpy as np

from .opencv import cv2

SHOWN_AS_IT_IS = {b"\xff\xd8\xff": "jpeg", b"\x89PNG\r\n\x1a\n": "png"}
MAX_BYTES = 1 << 20  # of a file in a page; larger ones are made smaller
MAX_SIDE = 768  # pixels of what is made smaller
SHOWN_HEIGHT = 256  # pixels in the page


def figure(image: bytes, *, caption: str) -> str:
    """Return an HTML figure with the image inside, and ``caption`` below it as text.

    A JPEG or PNG file of up to 1 MiB is included unchanged, anything else as a smaller JPEG file. Where the
    image does not decode, the figure says so.
    """
    text = html.escape(caption)
    source = _data_uri(image)
    if source is None:
        return f"<figure><figcaption>{text}: this image does not decode</figcaption></figure>"
    style = f"max-width: 100%; max-height: {SHOWN_HEIGHT}px"
    return f'<figure><img style="{style}" src="{source}"><figcaption>{text}</figcaption></figure>'


def _data_uri(image: bytes) -> str | None:
    kind = next((kind for begin, kind in SHOWN_AS_IT_IS.items() if image.startswith(begin)), None)
    shown = image if kind and len(image) <= MAX_BYTES else _smaller(image)
    if shown is None:
        return None
    name = kind if shown is image else "jpeg"
    return f"data:image/{name};base64,{base64.b64encode(shown).decode()}"


def _smaller(image: bytes) -> bytes | None:
    """Return a JPEG file of at most MAX_SIDE pixels a side; None for what does not decode."""
    try:
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # an empty image, or one of too many pixels
        return None
    if pixels is None:
        return None
    height, width = pixels.shape[:2]
    scale = min(1.0, MAX_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return bytes(cv2.imencode(".jpg", resized)[1])
