"""Some images side by side in a notebook, and as a list in a terminal."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from shardprep.formats.errors import BadImage
from shardprep.formats.printable import printable

from .figure import figure
from .header import read_image_header
from .kinds.image_info import KINDS

MOST_SHOWN = 100  # images; each may have THUMBNAIL_BYTES in the page
THUMBNAIL_BYTES = 128 << 10
THUMBNAIL_SIDE = 384  # pixels, of what is made smaller
THUMBNAIL_HEIGHT = 160  # pixels in the page
MOST_IN_CAPTION = 60  # characters


@dataclass(frozen=True)
class ShownImage:
    """An encoded image with the text below it."""

    image: bytes
    caption: str

    @property
    def line(self) -> str:
        """The caption, and the size of the image in pixels, its kind and its bytes."""
        form = f"{_form_of(self.image)}, {len(self.image):,} bytes" if self.image else "without an image"
        return f"{printable(self.caption, MOST_IN_CAPTION)}  {form}"


@dataclass(frozen=True, repr=False)
class Gallery:
    """Images that a notebook shows side by side. Its ``repr`` lists them, one in a line, for a terminal.

    ``title`` is a line above them. Captions are shown as text, in at most 60 characters.
    """

    title: str
    images: Sequence[ShownImage]

    def __repr__(self) -> str:
        return "\n".join((printable(self.title), *(f"  {each.line}" for each in self.images)))

    def __len__(self) -> int:
        return len(self.images)

    def _repr_html_(self) -> str:
        shown = "".join(self._figure(each) for each in self.images)
        style = "display: flex; flex-wrap: wrap; gap: 0.5em; align-items: flex-end"
        return f'<div>{html.escape(printable(self.title))}</div><div style="{style}">{shown}</div>'

    def _figure(self, each: ShownImage) -> str:
        caption = printable(each.caption, MOST_IN_CAPTION)
        if not each.image:
            return f"<figure><figcaption>{html.escape(caption)}</figcaption></figure>"
        return figure(
            each.image,
            caption=caption,
            most_bytes=THUMBNAIL_BYTES,
            most_side=THUMBNAIL_SIDE,
            height=THUMBNAIL_HEIGHT,
        )


def _form_of(image: bytes) -> str:
    try:
        info = read_image_header(image)
    except BadImage:
        return "unreadable"
    names = [name for name, flag in KINDS.items() if flag and flag & info.flags]
    return f"{info.width}x{info.height} {names[0] if names else 'JPEG'}"
