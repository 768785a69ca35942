"""The reader of a split's boxes, from a folder of XML files or an archive of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.sources.listing.entry_table import GrowingTable, official_key
from shardprep.formats.sources.listing.source import Box
from shardprep.formats.sources.listing.text_file import read_small_below
from shardprep.formats.sources.listing.tree_files import files_below, refuse_links
from shardprep.formats.sources.tar.walk import walk
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.gzip_stream import GzipStream
from shardprep.formats.system.regular_file import ArchiveFile

MAX_XML_BYTES = 1 << 20


MAX_NAME = 200  # characters of an object's class


_WNID = re.compile(r"n\d{8}", re.ASCII)


# Many annotations of dogs have words in place of a wnid, and always these.
_KNOWN_WORDS = {"Scottish_deerhound": "n02092002"}


MAX_BOXES_BYTES = 4 << 30  # inflated; 544,546 small files of train make about 1 GB
_KAGGLE = ("ILSVRC/Annotations/CLS-LOC", "Annotations/CLS-LOC", "Annotations")
_ARCHIVES = (".tar.gz", ".tgz", ".tar")


class BoxedObject(NamedTuple):
    """A class name, and a box in fractions of the displayed size, 0 ≤ min < max ≤ 1."""

    name: str
    x_min: float
    y_min: float
    x_max: float
    y_max: float


class _Builder(TreeBuilder):
    def doctype(self, *_: object) -> None:
        """Refuse a DOCTYPE: only there can entities that expand without limit or read files be declared."""
        raise ValueError("it has a DOCTYPE, which no annotation needs")


def parse_box_xml(data: bytes, own_class: str | None) -> Iterator[BoxedObject]:
    """Yield the objects in their order, without those wholly outside of the image.

    ``own_class`` is the image's class, if its name has it, and replaces names that are no wnid. Raises
    ValueError if the data is not such an XML.
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
    except (ParseError, LookupError) as error:  # LookupError for an encoding unknown to Python
        raise ValueError(f"it is not well-formed XML ({error})") from error


def _extent(element: Element, axis: str, whole: float) -> tuple[float, float]:
    """Return the lower and the upper end as fractions within the image; the XML may have them swapped."""
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
    if len(name) > MAX_NAME:
        raise ValueError(f"a class name in it has {len(name)} characters")
    return name if _WNID.fullmatch(name) else own_class or _KNOWN_WORDS.get(name, name)


_ROW = np.dtype(
    [
        ("key", "S1"),
        ("xml", "<i8"),
        ("name", "S1"),
        *((end, "<f8") for end in ("x_min", "y_min", "x_max", "y_max")),
    ]
)


class _Xml(NamedTuple):
    place: str
    stem: str
    data: bytes


def find_boxes(folders: Iterable[Path], split: str) -> Path | None:
    """Return the path of the boxes of a split in the first of the folders that has them, None without any.

    Folders of annotations for other images than ILSVRC12's are ignored. Raises SourceDamaged for links.
    """
    for folder in folders if split != "test" else ():
        kaggle = [folder / top / split for top in _KAGGLE]
        named = sorted(p for p in folder.glob(f"*bbox_{split}*") if "dogs" not in p.name)
        for path in (*kaggle, *named):
            if path.name.endswith(_ARCHIVES) or _is_official(path, folder):
                return path
    return None


def _is_official(path: Path, top: Path) -> bool:
    """Whether the path is a folder, and its first XML is named for an image of ILSVRC12."""
    if not path.is_dir():
        return False
    refuse_links(top, path)
    first = next((file for file in files_below(path) if file.path.endswith(".xml")), None)
    return first is not None and official_key(Path(first.path).stem) is not None


def read_boxes(path: Path) -> Iterator[Box]:
    """Yield the boxes by key and, within an image, in the order of its XML.

    Raises SourceDamaged for a damaged archive or XML, for two of one image, and for an XML that is not named
    for an image; the ``<filename>`` in it is often wrong and is ignored.
    """
    table = GrowingTable(_ROW)
    for number, xml in enumerate(_xmls_of_folder(path) if path.is_dir() else _xmls_of_archive(path)):
        _append(table, number, xml)
    rows = table.finish()
    rows = rows[np.argsort(rows["key"], kind="stable")]
    _refuse_repeated(rows, path)
    for row in rows:
        key, _, name, *ends = row.item()
        yield Box(key.decode(), name.decode(), *ends)


def _refuse_repeated(rows: npt.NDArray[np.void], path: Path) -> None:
    before, after = rows[:-1], rows[1:]
    repeated = after["key"][(before["key"] == after["key"]) & (before["xml"] != after["xml"])]
    if len(repeated):
        raise SourceDamaged("two XMLs are of this image; remove one", path=path, key=repeated[0].decode())


def _append(table: GrowingTable, number: int, xml: _Xml) -> None:
    with foreign_file(xml.place, "copy it again, or remove it"):
        key = official_key(xml.stem)
        if key is None or len(key) > MAX_KEY_BYTES:
            raise ValueError("it is not named for an image of ILSVRC12")
        own_class, slash, _ = key.partition("/")
        for name, *box in parse_box_xml(xml.data, own_class if slash else None):
            table.append((key.encode(), number, name.encode(), *box))


def _xmls_of_folder(folder: Path) -> Iterator[_Xml]:
    for file in files_below(folder):
        if file.path.endswith(".xml"):
            path = folder / file.path
            yield _Xml(str(path), path.stem, read_small_below(folder, file.path, MAX_XML_BYTES))


def _xmls_of_archive(path: Path) -> Iterator[_Xml]:
    opened = ArchiveFile(path) if path.suffix == ".tar" else GzipStream(path, MAX_BOXES_BYTES)
    with opened as archive:
        for member in walk(archive.read_at, archive=str(path), end=archive.end):
            if member.name.endswith(".xml"):
                place = f"{path}: {member.name}"
                if member.size > MAX_XML_BYTES:
                    raise SourceDamaged(f"has {member.size} bytes, too many for an annotation", path=place)
                yield _Xml(place, Path(member.name).stem, archive.read_at(member.size, member.offset))
