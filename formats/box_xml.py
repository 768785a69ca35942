"""One image's boxes in the XML of PASCAL VOC, with the defects that ILSVRC12's have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

MAX_XML_BYTES = 1 << 20

_WNID = re.compile(r"n\d{8}", re.ASCII)
# In place of a wnid many annotations of dogs have words, and always these.
_KNOWN_WORDS = {"Scottish_deerhound": "n02092002"}


class BoxedObject(NamedTuple):
    """A class name, and a box in fractions of the displayed size, 0 ≤ min < max ≤ 1."""

    name: str
    x_min: float
    y_min: float
    x_max: float
    y_max: float


class _Builder(TreeBuilder):
    def doctype(self, *_: object) -> None:
        """Entities that explode or read files are declared there, and nowhere else."""
        raise ValueError("it has a DOCTYPE, which no annotation needs")


def parse_box_xml(data: bytes, own_class: str | None) -> Iterator[BoxedObject]:
    """The objects in their order; those wholly outside of the image are left out.

    ``own_class`` is the image's, where its name tells: it stands for names that are no wnid.
    Raises ValueError for what is not such an XML.
    """
    root = _parse(data)
    width, height = _number(root, "size/width"), _number(root, "size/height")
    if width <= 0 or height <= 0:
        raise ValueError("its displayed size is not positive")
    for element in root.iterfind("object"):
        x_min, x_max = _extent(element, "x", width)
        y_min, y_max = _extent(element, "y", height)
        if x_min < x_max and y_min < y_max:
            yield BoxedObject(_class(element, own_class), x_min, y_min, x_max, y_max)


def _parse(data: bytes) -> Element:
    parser = XMLParser(target=_Builder())  # noqa: S314 - without a DOCTYPE there are no entities
    try:
        parser.feed(data)
        return parser.close()
    except ParseError as error:
        raise ValueError(f"it is not well-formed XML ({error})") from None


def _extent(element: Element, axis: str, whole: float) -> tuple[float, float]:
    """The lower and the upper end as fractions within the image; either may come first."""
    ends = (_number(element, f"bndbox/{axis}{end}") / whole for end in ("min", "max"))
    low, high = sorted(min(max(end, 0.0), 1.0) for end in ends)
    return low, high


def _number(element: Element, path: str) -> float:
    text = element.findtext(path)
    value = math.nan if text is None else float(text)
    if not math.isfinite(value):
        raise ValueError(f"its {path} is missing or not a number")
    return value


def _class(element: Element, own_class: str | None) -> str:
    name = (element.findtext("name") or "").strip()
    return name if _WNID.fullmatch(name) else own_class or _KNOWN_WORDS.get(name, name)
