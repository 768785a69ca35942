"""The source of images with COCO annotations: boxes, categories and segmentations."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, LabelConflict, SourceDamaged, UsageError
from shardprep.formats.images.header import jpeg_size
from shardprep.formats.records.record import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import Field, Schema, refuse_constant
from shardprep.formats.runtime.files import ArchiveFile, errors_as_damage
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.sources.listing import EntryTable, GrowingTable, find_unlisted, record_key
from shardprep.formats.sources.source import Entries, Listing, Problems, Source, SourceOptions, split_folders
from shardprep.formats.sources.tables import ImagesAndFile, relative_path
from shardprep.formats.sources.tar import describe_archive
from shardprep.formats.sources.trees import IMAGE_COLUMNS, FolderWalk, TreeReader, other_folders_note

ANNOTATIONS, PREFIX = "annotations", "instances_"
ROBOFLOW_FILE = "_annotations.coco.json"
LISTS = {"categories": "name", "images": "file_name", "annotations": "image_id"}
"""The lists in an instances file, and a name that each of their objects has."""
COLUMNS = (
    *(("boxes", "float32[*,4]"), ("box_labels", "int32[*]"), ("crowd", "bool[*]")),
    ("segmentation", "json"),
)
_ANNOTATION = ("offset", "size", "image", "category")
MAX_ID = 1 << 62
MAX_SIDE = 1 << 20  # pixels
MAX_OBJECT_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
_BOM = "\ufeff".encode()
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


class CocoSplit(NamedTuple):
    """A split's instances file, and the folder of its images."""

    instances: Path
    images: Path


def recognise_coco(path: Path, split: str | None, options: SourceOptions) -> CocoFolder | None:
    """Return the source of a folder with COCO instances, else None.

    Instances are the file of the option ``coco``; ``annotations/instances_<name>.json`` with images in
    ``<name>`` or ``images/<name>``, or in ``images`` for a single file; or ``_annotations.coco.json`` beside
    the images, in the folder of each split or in one folder. Raises UsageError if the option's file is
    missing, a split has two files, or only some splits have one.
    """
    if options.coco is not None:
        instances = path / options.coco
        if not instances.is_file():
            raise UsageError("does not exist; give --coco relative to the source", path=instances)
        only = CocoSplit(instances.resolve(), _find_images(instances, path, alone=True) or path)
        return CocoFolder(path, {split or _parse_split(instances): only}, options)
    by_split: dict[str, CocoSplit] = {}
    files = sorted((path / ANNOTATIONS).glob(f"{PREFIX}*.json"))
    for instances in files:
        images = _find_images(instances, path, alone=len(files) == 1)
        if images is None:
            continue
        if (name := _parse_split(instances)) in by_split:
            raise UsageError(f"is a second file of the split {name}; choose one with --coco", path=instances)
        by_split[name] = CocoSplit(instances, images)
    if not by_split:  # beside the images, as from Roboflow
        folders = {name: path / folder for name, folder in split_folders(path).items()}
        if not any((folder / ROBOFLOW_FILE).is_file() for folder in folders.values()):
            folders = {split or "train": path}
        splits = {name: CocoSplit(folder / ROBOFLOW_FILE, folder) for name, folder in folders.items()}
        by_split = {name: coco for name, coco in splits.items() if coco.instances.is_file()}
        if by_split and (without := splits.keys() - by_split.keys()):
            raise UsageError(
                f"lacks {ROBOFLOW_FILE}, which other splits have; add it, or move the folder away",
                path=folders[min(without, key=SPLITS.index)],
            )
    return CocoFolder(path, by_split, options) if by_split else None


@dataclass(frozen=True)
class CocoFolder(Source):
    """Images in folders, and the COCO instances of each split. Images have no labels.

    The columns have a value per object of an image, in the order of the file: ``boxes`` (x_min, y_min, x_max,
    y_max as fractions of the image), ``box_labels`` (the category among the classes of ``objects``),
    ``crowd``, and the unchanged ``segmentation``. ``objects`` are the categories of the image.
    """

    LAYOUT = "coco"
    OPTIONS = ("coco",)

    root: Path
    by_split: Mapping[str, CocoSplit]
    source_options: SourceOptions
    _categories: dict[str, Mapping[int, str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The categories of the splits read so far."""

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(coco.images.resolve() for coco in self.by_split.values())

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        coco, options = self.by_split[split], self.source_options
        parsed = CocoInstances(coco, follow_symlinks=options.follow_symlinks)
        for other, categories in self._categories.items():
            if categories != parsed.categories:
                raise LabelConflict(
                    f"has different categories from {self.by_split[other].instances.name} of {other}, so a "
                    "number would mean another class; give all files the same categories",
                    path=coco.instances,
                )
        self._categories[split] = parsed.categories
        classes = Field("objects", "labels", tuple(parsed.categories.values()))
        schema = Schema([*(Field(*column) for column in COLUMNS), classes])
        images = TreeReader(coco.images, options.follow_symlinks, IMAGE_COLUMNS)
        numbers = {each: number for number, each in enumerate(parsed.categories)}
        missing, unlisted = [*parsed.missing.values()], parsed.unlisted
        lacks = [("missing", missing), (f"not in {coco.instances.name}", unlisted)]
        return Listing(
            split,
            self.LAYOUT,
            parsed.entries,
            LabelSpace.of(()),
            CocoReader(
                images, coco.instances, parsed.identity, schema, numbers, parsed.images, parsed.places
            ),
            archives=(describe_archive(coco.instances),),
            expected=len(parsed.entries) + len(missing) + len(unlisted),
            shortfall=", ".join(f"{count_of(len(f), 'file')} {w}, first {f[0]}" for w, f in lacks if f),
            problems=parsed.problems,
            ignored=dict(parsed.ignored),
            notes=other_folders_note(self.root, self.folders),
            options=options.kept("follow_symlinks", "coco"),
            schema=schema,
        )


def refuse_coco_file(path: Path) -> None:
    """Raise UsageError, with the command to run, if the first object in a file is COCO's."""
    with ArchiveFile(path) as file:
        try:
            part, _, value = next(read_objects(JsonText(file)))
        except (ValueError, RecursionError, StopIteration):
            return
    if LISTS[part] in value:
        raise UsageError(
            "has COCO's annotations; give the folder of their images: prep convert IMAGES OUTPUT --coco "
            f"{shlex.quote(str(path))}",
            path=path,
        )


def _find_images(instances: Path, path: Path, *, alone: bool) -> Path | None:
    """Return the image folder of an instances file, which may be ``alone`` in the source at ``path``."""
    if instances.name == ROBOFLOW_FILE:
        return instances.parent
    images, name = path / "images", instances.stem.removeprefix(PREFIX)
    folders = [path / name, images / name]
    if alone:
        word = name.rpartition("_")[2]  # as of person_keypoints_train2017; not of coco_annotations
        folders += [path / word, images / word, images] if word.startswith(SPLITS) else [images]
    return next((folder for folder in folders if folder.is_dir()), None)


def _parse_split(instances: Path) -> str:
    """Return the split in an instances file's name, or train. Raises UsageError for two."""
    words = [word.removeprefix("mini") for word in re.findall("[a-z]+", instances.stem.lower())]
    named = {split for split in SPLITS for word in words if word.startswith(split)}
    if len(named) > 1:
        raise UsageError(
            f"is named after {' and '.join(sorted(named))}; choose it with --coco and --split", path=instances
        )
    return named.pop() if named else "train"


class CocoInstances:
    """The images and annotations of a split, ``missing`` and ``unlisted`` images, and the problems.

    ``categories`` has the names by ascending id, and ``entries`` a row per image with the offset of its JSON
    object. ``places`` are the offsets and sizes of the annotations, ordered by ``images``, the offsets of
    their images. ``ignored`` counts skipped files. Raises SourceDamaged for a file that is not COCO's.
    """

    def __init__(self, split: CocoSplit, *, follow_symlinks: bool) -> None:
        self.problems = Problems()
        self.missing = dict[int, Path]()
        self.categories: dict[int, str] = {}
        self._group_ids: set[int] = set()  # may represent a group of categories, and have the name of one
        self._path = split.instances
        self._walk = FolderWalk(split.images, follow_symlinks, self.problems)
        columns = [("image_length", "<i8"), ("width", "<i4"), ("height", "<i4"), ("id", "<i8")]
        self._table = EntryTable(self._path, self.problems, columns)
        self._annotations = GrowingTable(np.dtype([(name, "<i8") for name in _ANNOTATION]))
        with ArchiveFile(self._path) as file:
            text = JsonText(file)
            with self._errors_at(text):
                for part, offset, value in read_objects(text):
                    with self.problems.collect(part), self._errors_at(text):
                        self._add(part, value, offset, text.offset - offset)
            self.identity = file.identity
        annotations = self._annotations.finish()
        names, used = Counter(self.categories.values()), {*np.unique(annotations["category"]).tolist()}
        groups = {each for each in self._group_ids - used if names[self.categories[each]] > 1}
        self.categories = {each: name for each, name in sorted(self.categories.items()) if each not in groups}
        if not self.categories or len({*self.categories.values()}) < len(self.categories):
            what = "has no categories (for captions, write metadata.jsonl beside the images), or two with one name"
            raise SourceDamaged(f"{what}; correct it", path=self._path)
        self.entries = self._table.finish()
        self.images, self.places = self._locate(annotations)
        self.unlisted, self.ignored = list[Path](), Counter[str]()
        if not self.problems.has("images"):  # else some of the files have no entry
            self.unlisted = find_unlisted(self._walk, "", self.entries["path"])
            self.ignored = self._walk.ignored

    def _errors_at(self, text: JsonText) -> AbstractContextManager[None]:
        return errors_as_damage(
            self._path, "correct it, or copy it again", place=lambda: f"before byte {text.offset}: "
        )

    def _add(self, part: str, value: dict[str, Any], offset: int, size: int) -> None:
        number = _read_id(value, "id") if part != "annotations" else 0  # theirs are not used
        if part == "images":
            name, *sides = (value.get(each) for each in ("file_name", "width", "height"))
            if not isinstance(name, str) or not all(type(s) is int and 1 <= s <= MAX_SIDE for s in sides):
                raise ValueError(f"the image {number} has no file_name, or no valid width and height")
            place = relative_path(name, [self._walk.top])
            file = self._walk.find(place)
            if file is None:  # Label Studio's begin with the name of the folder, and a backslash on Windows
                place = relative_path(name.replace("\\", "/"), [self._walk.top])
                file = self._walk.find(place := place.removeprefix(f"{self._walk.top.name}/"))
            if file is None:
                self.missing[number] = self._walk.top / place
                return
            extra, key = (file.size, *sides, number), record_key("", place)
            self._table.append(key, UNLABELLED, length=file.size, offset=offset, file=file, extra=extra)
        elif part == "annotations":
            read_box(value)
            if value.get("iscrowd") not in (None, 0, 1):
                raise ValueError(f"the annotation {value.get('id')} has an iscrowd that is neither 0 nor 1")
            ids = _read_id(value, "image_id"), _read_id(value, "category_id")
            self._annotations.append((offset, size, *ids))
        else:
            name = value.get("name")
            if not isinstance(name, str) or not name or number in self.categories:
                raise ValueError(f"the category {number} has no name, or occurs twice")
            self.categories[number] = name
            if value.get("supercategory") == "none":  # as Roboflow writes the first one
                self._group_ids.add(number)

    def _locate(self, rows: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return ``images`` and ``places``, and add the sizes to the lengths of the entries."""
        ids = self.entries["id"]
        by_id = np.argsort(ids, kind="stable")
        if (np.diff(ids[by_id]) == 0).any():
            self.problems.add(SourceDamaged("two images have the same id; correct it", path=self._path))
        has_entry = np.isin(rows["image"], ids)
        has_image = has_entry | np.isin(rows["image"], [*self.missing])
        has_category = np.isin(rows["category"], [*self.categories])
        checks = ((has_image, "an image"), (has_category, "a category"))
        for is_known, what in () if self.problems else checks:
            for at_byte in rows["offset"][~is_known].tolist():
                missing = f"refers to {what} that does not exist; correct it"
                error = SourceDamaged(f"the annotation at byte {at_byte} {missing}", path=self._path)
                self.problems.add(error, what)
        rows = rows[has_entry & has_category]
        record = by_id[np.searchsorted(ids, rows["image"], sorter=by_id)]
        self.entries["length"] += np.bincount(record, rows["size"], len(ids)).astype(np.int64)
        of_image = self.entries["offset"][record]
        order = np.argsort(of_image, kind="stable")
        return of_image[order], np.stack([rows["offset"], rows["size"]], axis=1)[order]


def _read_id(value: dict[str, Any], name: str) -> int:
    number = value.get(name)
    if type(number) is not int or not -MAX_ID < number < MAX_ID:
        raise ValueError(f"the {name} of an object is not a whole number")
    return number


@dataclass
class CocoReader(ImagesAndFile):
    """Reader of images below a folder, and of their annotations in the file at ``path``.

    ``categories`` has the number of each id's class. ``annotations`` are offsets and sizes, ordered by
    ``image_of``, the offsets of their entries.
    """

    schema: Schema
    categories: Mapping[int, int]
    image_of: npt.NDArray[np.int64]
    annotations: npt.NDArray[np.int64]

    def restrict_to(self, entries: Entries) -> CocoReader:
        is_wanted = np.isin(self.image_of, entries["offset"])
        return replace(self, image_of=self.image_of[is_wanted], annotations=self.annotations[is_wanted])

    def read(self, entry: np.void) -> bytes:
        image = super().read(entry)
        width, height = jpeg_size(image) or (0, 0)
        if width != height and (width, height) == (entry["height"], entry["width"]):
            raise BadImage(
                f"has {width}x{height} pixels, but annotations for {height}x{width}, as if turned: apply its EXIF "
                "orientation to the file (such as by mogrify -auto-orient), or correct the annotations"
            )
        return image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        file, offset = self.resource[1], int(entry["offset"])
        first, last = np.searchsorted(self.image_of, [offset, offset + 1])
        sides = (int(entry["width"]), int(entry["height"]))
        with errors_as_damage(self.path, "start again", place=lambda: f"the image at byte {offset}: "):
            places = sorted(self.annotations[first:last].tolist())
            objects = [_DECODER.decode(file.read_at(size, at).decode()) for at, size in places]
            labels = [self.categories[each["category_id"]] for each in objects]
            boxes = np.array([read_box(each) for each in objects], np.float64).reshape(-1, 4)  # in pixels
            corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
            values = (
                np.clip(corners / (sides * 2), 0, 1).astype(np.float32),
                np.array(labels, np.int32),
                np.array([bool(each.get("iscrowd")) for each in objects], np.bool_),
                [each.get("segmentation") for each in objects],
                sorted(set(labels)),
            )
        return tuple(field.codec.encode(value) for field, value in zip(self.schema, values, strict=True))


class JsonText:
    """The text of a JSON file, read value by value. Methods raise ValueError for unexpected text."""

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self._start, self._at = len(_BOM) if file.read_at(len(_BOM), 0) == _BOM else 0, 0
        self._text = ""  # one character per byte from ``_start``, so that places are those in the file

    @property
    def offset(self) -> int:
        """The offset in the file of the next byte to read."""
        return self._start + self._at

    def peek(self) -> str:
        """Skip spaces and return the next character, without skipping it; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_fully_read:
                return ""
            self._read()

    def expect(self, mark: str) -> None:
        """Skip the mark, which must be next."""
        if self.peek() != mark:
            raise ValueError(f"expected {mark!r}, not {self.peek()!r}")
        self._at += 1

    def items(self, begin: str, end: str) -> Iterator[int]:
        """Yield the offset of each item between the marks; the caller must read it."""
        self.expect(begin)
        while self.peek() != end:
            yield self.offset
            if self.peek() != end:
                self.expect(",")
        self.expect(end)

    def read_value(self) -> Any:
        """Read the next value, of any type."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_fully_read:  # a number may continue
                    break
            except json.JSONDecodeError as error:
                if self._is_fully_read:
                    raise ValueError(f"is not JSON: {error.msg}") from error
            if len(self._text) - self._at > MAX_OBJECT_BYTES:
                raise ValueError(f"has no JSON value within {MAX_OBJECT_BYTES} bytes")
            self._read()
        raw, self._at = self._text[self._at : end], end
        return value if raw.isascii() else _DECODER.decode(raw.encode("latin-1").decode())

    @property
    def _is_fully_read(self) -> bool:
        return self._start + len(self._text) >= self._file.end

    def _read(self) -> None:
        """Read more, at least as much as there is."""
        left = self._text[self._at :]
        piece = self._file.read_at(max(PIECE_BYTES, len(left)), self._start + len(self._text))
        if not piece:
            raise ValueError("ends too early")
        self._start, self._at, self._text = self._start + self._at, 0, left + piece.decode("latin-1")


def read_objects(text: JsonText) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the list's name, the offset and the value of each object in COCO's lists."""
    for _ in text.items("{", "}"):
        name = text.read_value()
        text.expect(":")
        if name not in LISTS:
            text.read_value()
            continue
        for offset in text.items("[", "]"):
            if text.peek() != "{":
                raise ValueError("expected a JSON object")
            yield name, offset, text.read_value()
    if text.peek():
        raise ValueError("has text after its JSON object; remove it")


def read_box(annotation: dict[str, Any]) -> tuple[float, float, float, float]:
    """Return an annotation's left and upper edge, width and height in pixels. Raises ValueError."""
    box: Any = annotation.get("bbox")
    if box is None:
        raise ValueError(
            "an annotation has no bbox (give panoptic masks by --pair, and write labels without boxes to a list)"
        )
    are_numbers = isinstance(box, list) and all(type(side) in (int, float) for side in box)
    if not are_numbers or len(box) != 4 or min(box[2:]) < 0 or not all(abs(side) <= MAX_SIDE for side in box):
        raise ValueError(f"the annotation {annotation.get('id')} has no valid bbox of four numbers")
    left, top, width, height = map(float, box)
    return left, top, width, height
