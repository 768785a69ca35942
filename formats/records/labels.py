"""Label spaces: the integers that stand for classes, and the mapping from one space to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.runtime.lazy import cached_property

UNLABELLED = -1
MAX_CLASS_ID = (1 << 31) - 1
MAX_WORDS = 1000  # characters; the longest of ILSVRC12 has 121
SPACES = ("sorted_wnid0", "ilsvrc2012_id", "sorted_wnid1_bg")

OFFICIAL_IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}


@dataclass(frozen=True, slots=True)
class ImageClass:
    """A class: its name (for ImageNet the wnid), its words and its devkit id; None if unknown."""

    name: str
    words: str | None = None
    ilsvrc2012_id: int | None = None


@dataclass(frozen=True)
class LabelSpace:
    """The classes in label order: label *i* of ``sorted_wnid0`` is ``classes[i]``.

    Names are unique and sorted by code point; words are not unique (two classes are called crane).
    """

    classes: tuple[ImageClass, ...]

    @classmethod
    def of(
        cls, names: Iterable[str], words: dict[str, str] | None = None, ids: dict[str, int] | None = None
    ) -> LabelSpace:
        """Return the space of these class names; ``words`` default to those of ImageNet's wnids."""
        known = official_words() | (words or {})
        return cls(tuple(ImageClass(n, known.get(n), (ids or {}).get(n)) for n in sorted(set(names))))

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        ends = f" from {self.classes[0].name!r} to {self.classes[-1].name!r}" if self.classes else ""
        return f"<LabelSpace of {len(self):,} classes{ends}>"

    @property
    def counted(self) -> str:
        """The number of classes in words, such as ``1000 classes``."""
        return f"{len(self)} {'class' if len(self) == 1 else 'classes'}"

    @cached_property
    def label_of(self) -> dict[str, int]:
        """The label in ``sorted_wnid0`` by class name."""
        return {c.name: label for label, c in enumerate(self.classes)}

    @cached_property
    def label_of_id(self) -> dict[int, int]:
        """The label in ``sorted_wnid0`` by ILSVRC2012_ID; empty without the devkit."""
        return {c.ilsvrc2012_id: i for i, c in enumerate(self.classes) if c.ilsvrc2012_id is not None}

    @property
    def is_official(self) -> bool:
        """Whether these are exactly the 1,000 classes of ILSVRC12."""
        return self.label_of.keys() == official_words().keys()

    @property
    def digest(self) -> str:
        """The SHA-256 of the ordered class names; only equal spaces have equal digests."""
        return sha256_of([c.name for c in self.classes])

    def mapping(self, space: str) -> npt.NDArray[np.int64]:
        """Return an int64 array: ``mapping(space)[label]`` is the label in ``space``, -1 for -1.

        ``sorted_wnid0`` is 0 to n - 1; ``ilsvrc2012_id`` is 1 to n as in the devkit; ``sorted_wnid1_bg`` is 1
        to n with 0 for background. Raises UsageError for an unknown space, or without the devkit's ids.
        """
        if space == "sorted_wnid0":
            labels = list(range(len(self)))
        elif space == "sorted_wnid1_bg":
            labels = list(range(1, len(self) + 1))
        elif space == "ilsvrc2012_id":
            labels = [c.ilsvrc2012_id for c in self.classes if c.ilsvrc2012_id is not None]
            if len(labels) < len(self):
                raise UsageError("labels in ilsvrc2012_id need a dataset that was converted with the devkit")
        else:
            raise UsageError(f"unknown label space {space!r}; known are {', '.join(SPACES)}")
        return np.array([*labels, UNLABELLED], dtype=np.int64)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the classes for the manifest."""
        return [{"name": c.name, "words": c.words, "ilsvrc2012_id": c.ilsvrc2012_id} for c in self.classes]

    @classmethod
    def from_json(cls, classes: list[dict[str, Any]]) -> LabelSpace:
        """Return the space of a manifest's classes; the inverse of :meth:`to_json`."""
        return cls(tuple(ImageClass(**c) for c in classes))


@cache
def official_words() -> dict[str, str]:
    """Return the 1,000 wnids of ILSVRC12 in sorted order, each with its words."""
    text = resources.files("shardprep.formats.data").joinpath("wnids.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t", 1) for line in text.splitlines() if not line.startswith("#"))
