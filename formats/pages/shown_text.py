"""Numbers, text and pictures from files, as a page shows them."""

from __future__ import annotations

import base64

from markupsafe import Markup, escape

from shardprep.formats.printable import printable

MOST_IN_NAME = 80  # characters of a name in a page; the rest is in its tooltip, as far as that is bounded


def shown_name(text: object, most: int = MOST_IN_NAME) -> Markup:
    """Return a name from a file as HTML: printable, bounded, isolated from the direction of the text around.

    A longer name has up to 1,000 characters in its tooltip.
    """
    whole, short = printable(str(text)), printable(str(text), most)
    tip = Markup(' title="{}"').format(whole) if whole != short else ""
    return Markup("<bdi{}>{}</bdi>").format(tip, short)


def shown_number(value: float) -> str:
    """Return a number with separators, and with at most three significant digits after the point.

    >>> shown_number(1281167), shown_number(0.12345), shown_number(12.0)
    ('1,281,167', '0.123', '12')
    """
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown_share(value: float) -> str:
    """Return a fraction in percent; what is not nothing and not all is never shown as such.

    >>> shown_share(0.5), shown_share(0.00001), shown_share(1.0), shown_share(0.9999)
    ('50 %', 'under 0.1 %', '100 %', '99.9 %')
    """
    if 0 < value < 0.001:
        return "under 0.1 %"
    percent = min(value * 100, 99.9) if value < 1 else 100.0
    return f"{percent:.3g} %"


def shown_whole(value: float) -> str:
    """Return a number without its fraction, with separators."""
    return shown_number(round(value))


def shown_short(number: float) -> str:
    """Return a number in a few characters, as for an axis.

    >>> shown_short(1280000), shown_short(64512), shown_short(999)
    ('1.28M', '64.5k', '999')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return shown_number(number)


def picture_uri(file: bytes) -> Markup:
    """Return the bytes of a PNG or JPEG file as a URI that holds them, for the ``src`` of a picture."""
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return Markup("data:image/{};base64,{}").format(kind, base64.b64encode(file).decode("ascii"))


def finalized(value: object) -> object:
    """Return what a template writes for a value: text from anywhere is made printable and bounded."""
    if isinstance(value, Markup):
        return value
    return escape(printable(value)) if isinstance(value, str) else value
