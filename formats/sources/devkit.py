"""The files beside ILSVRC12's images: boxes in XML, and the development kit, whose MATLAB file is read here.

The reader takes a struct array in a little-endian MATLAB 5 file (MAT-File Format, chapter 1). scipy can read
more, but crashes on some damaged files.
"""

from __future__ import annotations

import csv
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path, PurePosixPath
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

import numpy as np

from shardprep.formats.errors import LabelConflict, SourceDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES, MAX_WORDS, UNLABELLED, LabelSpace
from shardprep.formats.runtime.files import ArchiveFile, GzipStream, errors_as_damage, read_small_file
from shardprep.formats.shards.read import Rows
from shardprep.formats.sources.listing import GrowingTable, official_key, read_lines
from shardprep.formats.sources.source import BOX_ROW
from shardprep.formats.sources.tar import walk_tar
from shardprep.formats.sources.trees import files_below, refuse_links

MAX_INFLATED_BYTES = 8 << 20  # the 1,860 official synsets take about 1 KB each
MAX_FIELDS = 1 << 8  # of a struct; the official file has 8
_LITTLE_ENDIAN = b"\x00\x01IM"
_MATRIX, _COMPRESSED = 14, 15  # table 1-1, data types
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}
_STRUCT, _CHAR, _NUMERIC = 2, 4, range(6, 16)  # table 1-3, array types
Value = str | int | float | None


MatElement = tuple[int, bytes]
"""A data type and data."""


def read_struct_array(data: bytes, name: str) -> list[dict[str, Value]]:
    """Return the rows of the struct array ``name``: numbers and text, None for others. Raises ValueError."""
    if data[124:128] != _LITTLE_ENDIAN or len(data) > MAX_INFLATED_BYTES:
        raise ValueError(f"not a MATLAB 5 file of at most {MAX_INFLATED_BYTES} bytes")
    for element in _parse_elements(data[128:]):
        for each in _parse_elements(_inflate(element[1])) if element[0] == _COMPRESSED else [element]:
            parts = _parse_array(each)
            if len(parts) >= 5 and parts[2][1] == name.encode():
                return _parse_rows(parts)
    raise ValueError(f"there is no struct array {name!r}")


def _inflate(data: bytes) -> bytes:
    inflater, inflated = zlib.decompressobj(), b""
    with suppress(zlib.error):
        inflated = inflater.decompress(data, MAX_INFLATED_BYTES + 1)
    if len(inflated) > MAX_INFLATED_BYTES or not inflater.eof:
        raise ValueError(f"it is damaged, or inflates to more than {MAX_INFLATED_BYTES} bytes")
    return inflated


def _parse_elements(data: bytes) -> list[MatElement]:
    """Return the elements, each a tag and data, padded to 8 bytes; small ones have both in 8 bytes."""
    at, elements = 0, []
    while at < len(data):
        kind, size, start = *struct.unpack_from("<II", data.ljust(at + 8, b"\0"), at), at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if len(data) - at < 8 or size > (len(data) - start if start == at + 8 else 4):
            raise ValueError("it is truncated")
        elements.append((kind, data[start : start + size]))
        at = start + size if kind == _COMPRESSED else -(-(start + size) // 8) * 8
    return elements


def _parse_array(element: MatElement) -> list[MatElement]:
    """Return the elements of an array; empty for any other kind."""
    return _parse_elements(element[1]) if element[0] == _MATRIX else []


def _parse_rows(parts: list[MatElement]) -> list[dict[str, Value]]:
    """Return the rows; the parts are flags, dimensions, name, length of field names, field names, values."""
    width, raw, values = _parse_number(parts[3]), parts[4][1], parts[5:]
    if _array_class(parts) != _STRUCT or not isinstance(width, int) or not 0 < len(raw) <= width * MAX_FIELDS:
        raise ValueError(f"it is not a struct array of 1 to {MAX_FIELDS} fields")
    names = [raw[at : at + width].split(b"\0")[0].decode("latin-1") for at in range(0, len(raw), width)]
    if len(values) % len(names):
        raise ValueError("its struct array is incomplete")
    fields = map(_parse_value, values)
    return [dict(zip(names, row, strict=True)) for row in zip(*[fields] * len(names), strict=True)]


def _parse_value(element: MatElement) -> Value:
    parts = _parse_array(element)
    if len(parts) != 4:  # flags, dimensions, name, data; complex numbers and structs have more
        return None
    array_class, (kind, data) = _array_class(parts), parts[3]
    if array_class == _CHAR and kind in _TEXTS:
        return data.decode(_TEXTS[kind], errors="replace")
    return _parse_number(parts[3]) if array_class in _NUMERIC else None


def _array_class(parts: list[MatElement]) -> int:
    return parts[0][1][0] if parts[0][1] else -1


def _parse_number(element: MatElement) -> int | float | None:
    """Return the value of an element with exactly one number, else None."""
    kind, data = element
    is_one = kind in _NUMBERS and len(data) == np.dtype(_NUMBERS[kind]).itemsize
    number: int | float | None = np.frombuffer(data, f"<{_NUMBERS[kind]}")[0].item() if is_one else None
    return number


DEVKIT_NAMES = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_DEVKIT_BYTES = 64 << 20  # packed or not; the official devkit has 2.5 MB packed
WNID = re.compile(r"n\d{8}", re.ASCII)
_ID = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Devkit:
    """The contents of a devkit.

    ``classes`` have their ILSVRC2012_ID; ``train_images`` is the number of training images by wnid;
    ``ground_truth[i]`` is the ILSVRC2012_ID of validation image *i* + 1.
    """

    classes: LabelSpace
    train_images: Mapping[str, int]
    ground_truth: tuple[int, ...]


def read_devkit(path: Path) -> Devkit:
    """Read the devkit from its archive, gzipped or not, or its folder. Raises SourceDamaged, OSError."""
    with errors_as_damage(path, f"download {DEVKIT_NAMES[0]} again"):
        files = _read_files(path)
        for name in (META, GROUND_TRUTH):
            if name not in files:
                raise ValueError(f"holds no {name}")
        classes, images = _parse_classes(files[META])
        truth = files[GROUND_TRUTH].decode("ascii", errors="replace").splitlines()
        for number, line in enumerate(truth, start=1):
            if not _ID.fullmatch(line.strip()) or not 1 <= int(line) <= len(classes):
                raise ValueError(f"{GROUND_TRUTH}: line {number} is not a number from 1 to {len(classes)}")
    return Devkit(classes, images, tuple(map(int, truth)))


def _read_files(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        names = [name for name in (META, GROUND_TRUTH) if (path / name).exists()]
        return {name: read_small_file(path / name, MAX_DEVKIT_BYTES) for name in names}
    if path.stat().st_size > MAX_DEVKIT_BYTES:
        raise SourceDamaged(f"has more than {MAX_DEVKIT_BYTES} bytes; it is not the devkit", path=path)
    files = {}
    with GzipStream(path, MAX_DEVKIT_BYTES) if path.suffix == ".gz" else ArchiveFile(path) as archive:
        for member in walk_tar(archive.read_at, archive=str(path), end=archive.end):
            name = "/".join(PurePosixPath(member.name).parts[-2:])
            if name in (META, GROUND_TRUTH):
                files[name] = archive.read_at(member.size, member.offset)
    return files


def _parse_classes(meta: bytes) -> tuple[LabelSpace, dict[str, int]]:
    """Return the classes, the synsets without children, and their numbers of training images."""
    words, ids, images = dict[str, str](), dict[str, int](), dict[str, int]()
    for synset in read_struct_array(meta, "synsets"):
        match synset:
            case {"num_children": int() | float() as children} if children >= 1:
                continue
            case {
                "num_children": 0,
                "WNID": str(wnid),
                "words": str(text),
                "ILSVRC2012_ID": int() | float() as number,
                "num_train_images": int() | float() as count,
            } if WNID.fullmatch(wnid) and wnid not in ids and len(text) <= MAX_WORDS and 0 <= count < 1 << 31:
                words[wnid], ids[wnid], images[wnid] = text, int(number), int(count)
            case wrong:
                raise ValueError(f"{META} has the invalid class {str(wrong)[:200]}")
    if not ids or sorted(ids.values()) != [*range(1, len(ids) + 1)]:
        raise ValueError(f"the ILSVRC2012_IDs in {META} are not 1 to their number")
    return LabelSpace.of(words, words=words, ids=ids), images


VAL_IMAGES = 50_000
FIRST_VAL = "ILSVRC2012_val_00000001"
FIRST_VAL_LABEL = 65  # n01751748, sea snake; its ILSVRC2012_ID is 490, so this tells labels from ids
VAL_LABEL_FILES = f"{DEVKIT_NAMES[0]}, LOC_val_solution.csv or Caffe's val.txt"
_ADVICE = "download it again"
_CAFFE_LINE = re.compile(r"(?:.*/)?(ILSVRC2012_val_\d{8})\.JPEG (\d{1,9})", re.ASCII)
_KAGGLE_HEAD = "ImageId,PredictionString"
_KAGGLE_LINE = re.compile(r"([^,]+),(\S+)[^,]*")  # the rest of the prediction is boxes


@dataclass(frozen=True)
class GroundTruth:
    """The labels of val by file and image (stem), in sorted_wnid0."""

    labels_by_file: Mapping[str, Mapping[str, int]]
    space: LabelSpace

    @property
    def images(self) -> list[str]:
        """The validation images (stems, sorted) with a label in any file."""
        return sorted({image for labels in self.labels_by_file.values() for image in labels})

    def label_of(self, image: str, folder: str | None = None) -> int:
        """Return the label on which all files and the image's ``folder`` agree. Raises LabelConflict."""
        by_file = {name: labels.get(image) for name, labels in self.labels_by_file.items()}
        if folder is not None:
            by_file["its folder"] = self.space.label_of[folder]
        label, *others = {*by_file.values()}
        if label is None or others:
            claims = ", ".join(
                f"{name} says " + ("nothing" if said is None else f"{self.space.classes[said].name} ({said})")
                for name, said in by_file.items()
            )
            raise LabelConflict(f"{claims}; remove the wrong one", key=image)
        return label


def check_first_label(space: LabelSpace, images: int, first: int | None, origin: str) -> None:
    """Raise LabelConflict if the ``first`` label of the official validation images is of another space."""
    if space.is_official and images == VAL_IMAGES and first not in (FIRST_VAL_LABEL, None):
        raise LabelConflict(
            f"{origin} says {first}, but in sorted_wnid0 it is {FIRST_VAL_LABEL}; the labels belong to "
            "another label space, or to other images",
            key=FIRST_VAL,
        )


def read_labels(path: Path, space: LabelSpace) -> dict[str, int]:
    """Read labels by image from ``LOC_val_solution.csv`` or Caffe's ``val.txt``. Raises DataError."""
    is_caffe, label_of = path.suffix == ".txt", dict[str, int]()
    with errors_as_damage(path, _ADVICE):
        lines = read_lines(path)
        if not is_caffe:
            lines = [",".join(cells) for cells in csv.reader(lines)]
        for line in filter(_KAGGLE_HEAD.__ne__, lines):
            match = (_CAFFE_LINE if is_caffe else _KAGGLE_LINE).fullmatch(line.strip())
            if match is None or match[1] in label_of:
                raise ValueError(
                    f"the line {line[:200]!r} is not an image and its label, or the image occurs twice"
                )
            label = int(match[2]) if is_caffe else space.label_of.get(match[2], len(space))
            if label >= len(space):
                unknown = f"says {match[2]}, which is not one of the {len(space):,} classes"
                raise LabelConflict(unknown, path=path, key=match[1])
            label_of[match[1]] = label
    return label_of


@dataclass(frozen=True)
class AnnotationFiles:
    """The annotation files in a folder, if any, read at first use, which raises DataError and OSError."""

    folder: Path | None

    def find(self, *names: str) -> Path | None:
        """Return the path of the first of these files that exists."""
        paths = [self.folder / name for name in names] if self.folder else []
        return next((path for path in paths if path.exists()), None)

    @cached_property
    def devkit(self) -> Devkit | None:
        path = self.find(*DEVKIT_NAMES)
        return read_devkit(path) if path else None

    @cached_property
    def space(self) -> LabelSpace | None:
        """The devkit's classes, or Kaggle's. Raises LabelConflict if both exist and differ."""
        words_of: dict[str, str] = {}
        if path := self.find("LOC_synset_mapping.txt"):  # a wnid, a space and its words per line
            with errors_as_damage(path, _ADVICE):
                pairs = [line.partition(" ") for line in read_lines(path) if line]
                words_of = {wnid: words.strip() for wnid, _, words in pairs}
                lengths = map(len, words_of.values())
                if len(words_of) < len(pairs) or not all(0 < length <= MAX_WORDS for length in lengths):
                    odd = f"has a line without words, a line of more than {MAX_WORDS} characters, or a class twice"
                    raise ValueError(odd)
        if self.devkit is None:
            return LabelSpace.of(words_of, words_of) if words_of else None
        differing = sorted(self.devkit.classes.label_of.keys() ^ words_of.keys()) if words_of else []
        if differing:
            raise LabelConflict(
                f"the devkit has different classes: {differing[0]} is in only one of them; remove one",
                path=path,
            )
        return self.devkit.classes

    def ground_truth(self, space: LabelSpace) -> GroundTruth:
        """Return the labels of val in all files; ``space`` is the devkit's if there is one."""
        by_file: dict[str, Mapping[str, int]] = {}
        if self.devkit:  # line i is for image number i
            numbers = enumerate(self.devkit.ground_truth, start=1)
            by_file["the devkit"] = {f"ILSVRC2012_val_{i:08d}": space.label_of_id[n] for i, n in numbers}
        for name in ("LOC_val_solution.csv", "val.txt"):
            path = self.find(name)
            if path and (name != "val.txt" or _is_caffe(path)):
                by_file[name] = read_labels(path, space)
        for name, labels in by_file.items():
            check_first_label(space, len(labels), labels.get(FIRST_VAL), name)
        return GroundTruth(by_file, space)

    @property
    def train_images(self) -> Mapping[str, int]:
        """The expected number of training images per class; empty if no file states it."""
        return self.devkit.train_images if self.devkit else self.count_image_set("train")

    def count_image_set(self, split: str) -> Counter[str]:
        """Count the lines of Kaggle's list by the text before the first slash, for train the class."""
        path = self.find(f"ILSVRC/ImageSets/CLS-LOC/{'train_cls' if split == 'train' else split}.txt")
        if path is None or not path.is_file():
            return Counter()
        lines = BytesIO(read_small_file(path))
        return Counter(line.partition(b"/")[0].decode(errors="replace") for line in lines if line.strip())


def _is_caffe(path: Path) -> bool:
    """Whether a file begins like Caffe's: other datasets also have a ``val.txt``."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _CAFFE_LINE.fullmatch(file.readline(4096).decode(errors="replace").strip()) is not None


MAX_XML_BYTES = 1 << 20
_WNID_OF_NAME = {"Scottish_deerhound": "n02092002"}  # instead of the wnid in many annotations of dogs
MAX_BOXES_BYTES = 4 << 30  # inflated; the 544,546 small files of train take about 1 GB
_KAGGLE = ("ILSVRC/Annotations/CLS-LOC", "Annotations/CLS-LOC", "Annotations")
_ARCHIVES = (".tar.gz", ".tgz", ".tar")


class _Builder(TreeBuilder):
    def doctype(self, *_: object) -> None:
        """Refuse a DOCTYPE: only it can declare entities, which may expand without limit or read files."""
        raise ValueError("it has a DOCTYPE, which annotations may not have")


def parse_box_xml(data: bytes, key: str) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield the class and sides of each object, in order, except those wholly outside the image.

    The class in the image's key, if any, replaces names that are not wnids. Raises ValueError for other data.
    """
    own_class = key.partition("/")[0] if "/" in key else None
    parser = XMLParser(target=_Builder())  # noqa: S314 - without a DOCTYPE there are no entities
    try:
        parser.feed(data)
        root: Element = parser.close()
    except (ParseError, LookupError) as error:  # LookupError for an encoding unknown to Python
        raise ValueError(f"it is not well-formed XML ({error})") from error
    width, height = _parse_side(root, "size/width"), _parse_side(root, "size/height")
    if width <= 0 or height <= 0:
        raise ValueError("its displayed size is not positive")
    for element in root.iterfind("object"):
        x_min, x_max = _parse_extent(element, "x", width)
        y_min, y_max = _parse_extent(element, "y", height)
        if x_min < x_max and y_min < y_max:
            name = (element.findtext("name") or "").strip()
            if not WNID.fullmatch(name):
                name = own_class or _WNID_OF_NAME.get(name, name)
            yield name, x_min, y_min, x_max, y_max


def _parse_extent(element: Element, axis: str, whole: float) -> tuple[float, float]:
    """Return the lower and upper end as fractions within the image; they may be swapped in the XML."""
    ends = (_parse_side(element, f"bndbox/{axis}{end}") / whole for end in ("min", "max"))
    low, high = sorted(min(max(end, 0.0), 1.0) for end in ends)
    return low, high


def _parse_side(element: Element, path: str) -> float:
    text = element.findtext(path)
    value = math.nan if text is None else float(text)
    if not math.isfinite(value):
        raise ValueError(f"its {path} is missing or not a number")
    return value


def find_boxes(folder: Path, split: str) -> Path | None:
    """Return the path of a split's boxes of ILSVRC12's images, or None. Raises SourceDamaged for links."""
    kaggle = [folder / top / split for top in _KAGGLE]
    named = sorted(p for p in folder.glob(f"*bbox_{split}*") if "dogs" not in p.name)
    for path in (*kaggle, *named) if split != "test" else ():
        if path.name.endswith(_ARCHIVES):
            return path
        if path.is_dir():
            refuse_links(folder, path)
            first = next((file for file in files_below(path) if file.path.endswith(".xml")), None)
            if first and official_key(Path(first.path).stem):
                return path
    return None


def read_boxes(path: Path, labels: LabelSpace) -> Rows:
    """Return the boxes as rows of BOX_ROW, sorted by key, and within an image in the order of its XML.

    Raises SourceDamaged for a damaged archive or XML, two XMLs of one image, and an XML that is not named
    after an image; the ``<filename>`` in it is often wrong and ignored.
    """
    table, annotated = GrowingTable(BOX_ROW), set[str]()
    for place, stem, data in _read_xmls(path):
        with errors_as_damage(place, "copy it again, or remove it"):
            key = official_key(stem)
            if key is None or len(key) > MAX_KEY_BYTES:
                raise ValueError("it is not named after an image of ILSVRC12")
            boxes = [*parse_box_xml(data, key)]
        if boxes and key in annotated:
            raise SourceDamaged("two XML files annotate this image; remove one", path=path, key=key)
        for name, *sides in boxes:
            annotated.add(key)
            table.append((key.encode(), 0, labels.label_of.get(name, UNLABELLED), *sides))
    rows = table.finish()
    return rows[np.argsort(rows["key"], kind="stable")]


def _read_xmls(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the location, stem and bytes of each XML in a folder or an archive."""
    if path.is_dir():
        for file in files_below(path):
            if file.path.endswith(".xml"):
                data = read_small_file(path / file.path, MAX_XML_BYTES)
                yield str(path / file.path), Path(file.path).stem, data
        return
    with ArchiveFile(path) if path.suffix == ".tar" else GzipStream(path, MAX_BOXES_BYTES) as archive:
        for member in walk_tar(archive.read_at, archive=str(path), end=archive.end):
            if member.name.endswith(".xml"):
                place = f"{path}: {member.name}"
                if member.size > MAX_XML_BYTES:
                    raise SourceDamaged(f"has {member.size} bytes, too many for an annotation", path=place)
                yield place, Path(member.name).stem, archive.read_at(member.size, member.offset)
