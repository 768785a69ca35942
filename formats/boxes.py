"""The boxes of a split, from a folder of XML files or an archive of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .archive_file import ArchiveFile
from .box_xml import MAX_XML_BYTES, parse_box_xml
from .entry_table import GrowingTable
from .errors import SourceDamaged
from .gzip_stream import GzipStream
from .keys import official_key
from .source import Box
from .tar_walk import walk
from .text_file import read_small_file
from .tree_walk import files_below, refuse_links

MAX_BOXES_BYTES = 4 << 30  # inflated; 544,546 small files of train make about 1 GB
_KAGGLE = ("ILSVRC/Annotations/CLS-LOC", "Annotations/CLS-LOC", "Annotations")
_ARCHIVES = (".tar.gz", ".tgz", ".tar")
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
    """Where the boxes of a split are given in the first of the folders that has them, if any has.

    Folders of annotations for other images than ILSVRC12's are none. Raises SourceDamaged for links.
    """
    for folder in folders if split != "test" else ():
        kaggle = [folder / top / split for top in _KAGGLE]
        named = sorted(p for p in folder.glob(f"*bbox_{split}*") if "dogs" not in p.name)
        for path in (*kaggle, *named):
            if path.name.endswith(_ARCHIVES) or _is_official(path, folder):
                return path
    return None


def _is_official(path: Path, top: Path) -> bool:
    """Whether it is a folder whose first XML is named for an image of ILSVRC12."""
    if not path.is_dir():
        return False
    refuse_links(top, path)
    first = next((file for file in files_below(path) if file.path.endswith(".xml")), None)
    return first is not None and official_key(Path(first.path).stem) is not None


def read_boxes(path: Path) -> Iterator[Box]:
    """Ordered by key and, within an image, as its XML has them.

    Raises SourceDamaged for a damaged archive or XML, for two of one image, and for an XML whose own
    name is no image's; the ``<filename>`` in it is often wrong and is not looked at.
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
        raise SourceDamaged("two XMLs are of this image; take one away", path=path, key=repeated[0].decode())


def _append(table: GrowingTable, number: int, xml: _Xml) -> None:
    key = official_key(xml.stem)
    try:
        if key is None:
            raise ValueError("it is not named for an image of ILSVRC12")
        own_class, slash, _ = key.partition("/")
        for name, *box in parse_box_xml(xml.data, own_class if slash else None):
            table.append((key.encode(), number, name.encode(), *box))
    except ValueError as error:
        raise SourceDamaged(f"{error}; copy it again, or take it away", path=xml.place) from error


def _xmls_of_folder(folder: Path) -> Iterator[_Xml]:
    for file in files_below(folder):
        if file.path.endswith(".xml"):
            path = folder / file.path
            yield _Xml(str(path), path.stem, read_small_file(path, MAX_XML_BYTES))


def _xmls_of_archive(path: Path) -> Iterator[_Xml]:
    opened = ArchiveFile(path) if path.suffix == ".tar" else GzipStream(path, MAX_BOXES_BYTES)
    with opened as archive:
        for member in walk(archive.read_at, archive=str(path), end=archive.end):
            if member.name.endswith(".xml"):
                place = f"{path}: {member.name}"
                if member.size > MAX_XML_BYTES:
                    raise SourceDamaged(f"has {member.size} bytes, too many for an annotation", path=place)
                yield _Xml(place, Path(member.name).stem, archive.read_at(member.size, member.offset))
