"""The names of features by which programs write images and labels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SIDES = ("xmin", "ymin", "xmax", "ymax")
BOX_SIDES = tuple(f"image/object/bbox/{side}" for side in SIDES)
BOX_LABEL = "image/object/bbox/label"


@dataclass(frozen=True)
class Dialect:
    """The features that have the image, its label, the class's name and the file's name; "" for none.

    ``first_label`` is the number of the first class in the file; it is stored as 0.
    """

    image: str = ""
    label: str = ""
    class_name: str = ""
    file_name: str = ""
    first_label: int = 0
    boxes: bool = False

    @property
    def no_columns(self) -> frozenset[str]:
        """The features that are no columns: what they say is in the record, its classes or its boxes."""
        boxes = (*BOX_SIDES, BOX_LABEL) if self.boxes else ()
        return frozenset({self.image, self.label, self.class_name, *boxes} - {""})


def dialect_of(names: Collection[str]) -> Dialect:
    """Return the dialect of a record with features of these names.

    Those of the official scripts for ImageNet have the synset beside the label, and count from 1. Other
    programs that have taken their names count from 0 or from 1, which cannot be known: labels stay.
    """

    def there(name: str) -> str:
        return name if name in names else ""

    if "image/encoded" in names:
        label = there("image/class/label")
        synset = there("image/class/synset") if label else ""
        boxes = set(BOX_SIDES) <= set(names)
        return Dialect("image/encoded", label, synset, there("image/filename"), int(bool(synset)), boxes)
    file_name = there("file_name") or there("image/filename")
    return Dialect(there("image"), there("label"), "", file_name)
