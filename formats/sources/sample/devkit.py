"""The devkit of a sample: the ids of the classes, and the ground truth of val."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from shardprep.formats.records.labels import official_words

from .archives import add_member, tar_gz
from .plan import SamplePlan

INT8, INT32, UINT16, UINT32, DOUBLE, MATRIX, COMPRESSED = 1, 5, 4, 6, 9, 14, 15  # table 1-1


STRUCT, CHAR, DOUBLE_ARRAY = 2, 4, 6  # table 1-3


VERSION = b"\x00\x01IM"  # 1.0, little-endian


NAME_BYTES = 32  # a field's name, with the zero that ends it


Cell = str | float | Sequence[float]


FOLDER = "ILSVRC2012_devkit_t12"
FIRST_WNID_OF_THINGS = "n02666196"  # abacus: the 398 classes before it, by wnid, are animals
MAT_COMMENT = "MATLAB 5.0 MAT-file, a miniature of ILSVRC2012's meta.mat"
README = """\
This is a miniature of the ILSVRC2012 development kit, made by `prep sample`: its archives are packed as the
official ones are, and their images are crops of a few free photographs. The classes' names are real, what the
images show is not of these classes. It serves to try things out and is of no use for an evaluation.

data/meta.mat                                   the classes: ILSVRC2012_ID, WNID, words, ...
data/ILSVRC2012_validation_ground_truth.txt     an ILSVRC2012_ID per validation image, by ascending file name
"""


def write_struct_array(name: str, columns: Mapping[str, Sequence[Cell]], *, comment: str) -> bytes:
    """Return a MAT file with one struct array of shape (n, 1). Deterministic: it contains no time.

    A cell is text, a number, or a row of numbers.
    """
    rows = zip(*columns.values(), strict=True)
    cells = [_cell(value) for row in rows for value in row]
    parts = [
        _element(INT32, struct.pack("<i", NAME_BYTES)),
        _element(INT8, b"".join(field.encode().ljust(NAME_BYTES, b"\0") for field in columns)),
        *cells,
    ]
    array = _array(STRUCT, (len(cells) // len(columns), 1), parts, name=name)
    packed = zlib.compress(array)
    header = comment.encode().ljust(116)[:116] + bytes(8) + VERSION
    return header + struct.pack("<II", COMPRESSED, len(packed)) + packed


def _cell(value: Cell) -> bytes:
    if isinstance(value, str):
        data = _element(UINT16, value.encode("utf-16-le"))
        return _array(CHAR, (1, len(value)), [data])
    numbers = [value] if isinstance(value, int | float) else list(value)
    data = _element(DOUBLE, struct.pack(f"<{len(numbers)}d", *numbers))
    return _array(DOUBLE_ARRAY, (1, len(numbers)), [data])


def _array(kind: int, shape: tuple[int, int], parts: Sequence[bytes], *, name: str = "") -> bytes:
    head = [
        _element(UINT32, struct.pack("<II", kind, 0)),
        _element(INT32, struct.pack("<2i", *shape)),
        _element(INT8, name.encode()),
    ]
    return _element(MATRIX, b"".join([*head, *parts]))


def _element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


@dataclass(frozen=True, slots=True)
class Synset:
    """A row of meta.mat: a class (a leaf, of height 0) or a group of classes."""

    wnid: str
    words: str
    gloss: str
    children: tuple[int, ...] = ()
    height: int = 0
    train_images: int = 0


def write_devkit(file: IO[bytes], plan: SamplePlan, photographs: tuple[str, ...]) -> None:
    """Write the devkit; a class's gloss names the photographs that its images are crops of."""
    truth = "".join(f"{image.label + 1}\n" for image in plan.val_images())
    with tar_gz(file) as tar:
        add_member(tar, f"{FOLDER}/readme.txt", README.encode())
        add_member(tar, f"{FOLDER}/data/meta.mat", meta_mat(synsets(plan, photographs)))
        add_member(tar, f"{FOLDER}/data/ILSVRC2012_validation_ground_truth.txt", truth.encode())


def synsets(plan: SamplePlan, photographs: tuple[str, ...]) -> list[Synset]:
    """Return the rows of meta.mat, ILSVRC2012_ID 1 first: the classes, then animal, thing and entity."""
    leaves = [_leaf(plan, label, photographs) for label in range(plan.classes)]
    animals, things = _ids(leaves, animals=True), _ids(leaves, animals=False)
    groups = [
        Synset("n00015388", "animal", "all the animals here", animals, height=1),
        Synset("n00001930", "physical entity", "all the rest", things, height=1),
    ]
    groups = [group for group in groups if group.children]  # a group without children would be a class
    children = tuple(range(len(leaves) + 1, len(leaves) + len(groups) + 1))
    return [*leaves, *groups, Synset("n00001740", "entity", "all there is", children, height=2)]


def _leaf(plan: SamplePlan, label: int, photographs: tuple[str, ...]) -> Synset:
    wnid = plan.wnids[label]
    gloss = "here, crops of " + ", ".join(photographs[p] for p in plan.photographs(label))
    return Synset(wnid, official_words()[wnid], gloss, train_images=plan.train_per_class)


def _ids(leaves: list[Synset], *, animals: bool) -> tuple[int, ...]:
    return tuple(i for i, leaf in enumerate(leaves, start=1) if (leaf.wnid < FIRST_WNID_OF_THINGS) is animals)


def meta_mat(rows: list[Synset]) -> bytes:
    """Return a MATLAB 5 file with the struct array ``synsets`` of shape (n, 1)."""
    columns: dict[str, list[Cell]] = {
        "ILSVRC2012_ID": [float(i) for i in range(1, len(rows) + 1)],
        "WNID": [row.wnid for row in rows],
        "words": [row.words for row in rows],
        "gloss": [row.gloss for row in rows],
        "num_children": [float(len(row.children)) for row in rows],
        "children": [row.children for row in rows],
        "wordnet_height": [float(row.height) for row in rows],
        "num_train_images": [float(row.train_images) for row in rows],
    }
    return write_struct_array("synsets", columns, comment=MAT_COMMENT)
