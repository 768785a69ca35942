"""The files beside the images with their classes, labels and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

from shardprep.formats.errors import LabelConflict
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace
from shardprep.formats.sources.listing.text_file import read_small_file, text_lines
from shardprep.formats.system.foreign_file import foreign_file

from .devkit import FORMS, Devkit, read_devkit
from .ground_truth import (
    FIRST_VAL,
    Authority,
    GroundTruth,
    caffe_authority,
    check_sentinel,
    devkit_authority,
    is_caffe_list,
    kaggle_authority,
)

WANTED_FOR_CLASSES = f"{FORMS[0]} or LOC_synset_mapping.txt"
WANTED_FOR_VAL = f"{FORMS[0]}, LOC_val_solution.csv or Caffe's val.txt"
_IMAGE_SETS = {"train": "train_cls.txt", "val": "val.txt", "test": "test.txt"}


@dataclass(frozen=True)
class AnnotationFiles:
    """The files that were found; each is read at its first use, which raises DataError and OSError."""

    devkit_path: Path | None = None
    synset_mapping: Path | None = None
    val_solution: Path | None = None
    caffe_val: Path | None = None
    image_sets: Path | None = None

    @classmethod
    def beside(cls, *folders: Path) -> AnnotationFiles:
        """Return the files in these folders; earlier folders come first."""
        caffe = _first(folders, "val.txt")
        return cls(
            devkit_path=_first(folders, *FORMS),
            synset_mapping=_first(folders, "LOC_synset_mapping.txt"),
            val_solution=_first(folders, "LOC_val_solution.csv"),
            caffe_val=caffe if caffe and is_caffe_list(caffe) else None,
            image_sets=_first(folders, "ILSVRC/ImageSets/CLS-LOC"),
        )

    @cached_property
    def devkit(self) -> Devkit | None:
        return read_devkit(self.devkit_path) if self.devkit_path else None

    @cached_property
    def space(self) -> LabelSpace | None:
        """The devkit's classes, or Kaggle's. Raises LabelConflict if both exist and differ."""
        mapped = _mapped_words(self.synset_mapping) if self.synset_mapping else None
        if self.devkit is None:
            return LabelSpace.of(mapped, mapped) if mapped else None
        differing = sorted(self.devkit.classes.label_of.keys() ^ mapped.keys()) if mapped else []
        if differing:
            raise LabelConflict(
                f"the devkit has other classes, {differing[0]} is in one of them only; remove one",
                path=self.synset_mapping,
            )
        return self.devkit.classes

    def ground_truth(self, space: LabelSpace) -> GroundTruth:
        """Return all labels of val; without any file, the result has no authorities."""
        found: list[Authority] = []
        if self.devkit:
            found.append(devkit_authority(self.devkit, space))
        if self.val_solution:
            found.append(kaggle_authority(self.val_solution, space))
        if self.caffe_val:
            found.append(caffe_authority(self.caffe_val, space))
        for one in found:
            first = one.labels.get(FIRST_VAL)
            check_sentinel(space, images=len(one.labels), first=first, said_by=one.name)
        return GroundTruth(tuple(found), space)

    def images(self, split: str, space: LabelSpace) -> int | None:
        """Return the number of images that the split should have, None if no file states it."""
        if split == "train":
            return sum(self.train_images.values()) or None
        named = len(self.val_images(space)) if split == "val" else 0
        return named or sum(self._listed(split).values()) or None

    def val_images(self, space: LabelSpace) -> list[str]:
        """Return the validation images (stems, sorted) with known labels."""
        return sorted({image for one in self.ground_truth(space).authorities for image in one.labels})

    @property
    def train_images(self) -> Mapping[str, int]:
        """The number of training images that each class should have; empty if no file states it."""
        return self.devkit.train_images if self.devkit else self._listed("train")

    def _listed(self, split: str) -> Counter[str]:
        """Count the lines of Kaggle's list by the text before the first slash, in train the class."""
        path = self.image_sets / _IMAGE_SETS[split] if self.image_sets else None
        if path is None or not path.is_file():
            return Counter()
        lines = BytesIO(read_small_file(path))
        return Counter(line.partition(b"/")[0].decode(errors="replace") for line in lines if line.strip())


def _first(folders: Iterable[Path], *names: str) -> Path | None:
    candidates = (folder / name for folder in folders for name in names)
    return next((path for path in candidates if path.exists()), None)


def _mapped_words(path: Path) -> dict[str, str]:
    """Read ``LOC_synset_mapping.txt``, with a wnid, a space and its words per line."""
    with foreign_file(path, "download it again"):
        pairs = [line.partition(" ") for line in text_lines(read_small_file(path), path) if line]
        words = {wnid: words.strip() for wnid, _, words in pairs}
        if len(words) < len(pairs) or not all(0 < len(text) <= MAX_WORDS for text in words.values()):
            raise ValueError(
                f"has a line without words, or of more than {MAX_WORDS} characters, or a class twice"
            )
    return words
