"""What lies beside the images and speaks about them: classes, labels and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .archive_file import naming
from .devkit import FORMS, Devkit, read_devkit
from .errors import LabelConflict, SourceDamaged
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
from .labels import LabelSpace
from .text_file import read_small_file, text_lines

WANTED_FOR_CLASSES = f"{FORMS[0]} or LOC_synset_mapping.txt"
WANTED_FOR_VAL = f"{FORMS[0]}, LOC_val_solution.csv or Caffe's val.txt"
_IMAGE_SETS = {"train": "train_cls.txt", "val": "val.txt", "test": "test.txt"}


@dataclass(frozen=True)
class Evidence:
    """The files that were found; each is read when it is first needed. Raises DataError, OSError then."""

    devkit_path: Path | None = None
    synset_mapping: Path | None = None
    val_solution: Path | None = None
    caffe_val: Path | None = None
    image_sets: Path | None = None

    @classmethod
    def beside(cls, *folders: Path) -> Evidence:
        """What these folders hold, the first one first."""
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
        """The devkit's classes, or Kaggle's; LabelConflict where both are there and differ."""
        mapped = _mapped_words(self.synset_mapping) if self.synset_mapping else None
        if self.devkit is None:
            return LabelSpace.of(mapped, mapped) if mapped else None
        differing = sorted(self.devkit.classes.label_of.keys() ^ mapped.keys()) if mapped else []
        if differing:
            raise LabelConflict(
                f"the devkit has other classes, {differing[0]} is in one of them only; take one away",
                path=self.synset_mapping,
            )
        return self.devkit.classes

    def ground_truth(self, space: LabelSpace) -> GroundTruth:
        """All that is said about val; it has no authorities where nothing is."""
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
        """How many images the split should have by all that is said of it; None where nobody says."""
        if split == "train":
            return sum(self.train_images.values()) or None
        named = len(self.val_images(space)) if split == "val" else 0
        return named or sum(self._listed(split).values()) or None

    def val_images(self, space: LabelSpace) -> list[str]:
        """The validation images (stems, sorted) whose labels are known; none where nobody says."""
        return sorted({image for one in self.ground_truth(space).authorities for image in one.labels})

    @property
    def train_images(self) -> Mapping[str, int]:
        """How many training images each class should have; empty where nobody says."""
        return self.devkit.train_images if self.devkit else self._listed("train")

    def _listed(self, split: str) -> Counter[str]:
        """Lines of Kaggle's list by what is before the first slash, in train the class."""
        path = self.image_sets / _IMAGE_SETS[split] if self.image_sets else None
        if path is None or not path.is_file():
            return Counter()
        with naming(path), path.open("rb") as lines:
            return Counter(line.partition(b"/")[0].decode(errors="replace") for line in lines if line.strip())


def _first(folders: Iterable[Path], *names: str) -> Path | None:
    candidates = (folder / name for folder in folders for name in names)
    return next((path for path in candidates if path.exists()), None)


def _mapped_words(path: Path) -> dict[str, str]:
    """``LOC_synset_mapping.txt``: a wnid, a space and its words a line."""
    pairs = [line.partition(" ") for line in text_lines(read_small_file(path), path) if line]
    words = {wnid: words.strip() for wnid, _, words in pairs}
    if len(words) < len(pairs) or not all(words.values()):
        raise SourceDamaged("has a line without words, or a class twice; download it again", path=path)
    return words
