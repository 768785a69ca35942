"""The boxes of a split, from a folder of XML files or an archive of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .archive_file import ArchiveFile
from .box_xml import MAX_XML_BYTES, parse_box_xml
from .entry_table import GrowingTable
from .errors import SourceDamaged
from .gzip_stream import GzipStream
from .keys import official_key
from .source import Box
from .tar_walk import walk
from .text_file import read_small_file
from .tree_walk import files_below

MAX_BOXES_BYTES = 4 << 30  # inflated; 544,546 small files of train make about 1 GB
_ARCHIVES = (".tar.gz", ".tgz", ".tar")
_ROW = np.dtype(
    [("key", "S1"), ("name", "S1"), *((end, "<f8") for end in ("x_min", "y_min", "x_max", "y_max"))]
)


class _Xml(NamedTuple):
    place: str
    stem: str
    data: bytes


def find_boxes(folders: Iterable[Path], split: str) -> Path | None:
    """Where the boxes of a split are given in the first of the folders that has them, if any has."""
    for folder in folders if split != "test" else ():
        kaggle = [
            folder / top / split
            for top in ("ILSVRC/Annotations/CLS-LOC", "Annotations/CLS-LOC", "Annotations")
        ]
        named = sorted(p for p in folder.glob(f"*bbox_{split}*") if "dogs" not in p.name)
        for path in (*kaggle, *named):
            if path.is_dir() or path.name.endswith(_ARCHIVES):
                return path
    return None


def read_boxes(path: Path) -> Iterator[Box]:
    """Ordered by key and, within an image, as its XML has them.

    Raises SourceDamaged for a damaged archive or XML, and for an XML whose own name is no image's;
    the ``<filename>`` in it is often wrong and is not looked at.
    """
    table = GrowingTable(_ROW)
    for xml in _xmls_of_folder(path) if path.is_dir() else _xmls_of_archive(path):
        _append(table, xml)
    rows = table.finish()
    for row in rows[np.argsort(rows["key"], kind="stable")]:
        key, name, *ends = row.item()
        yield Box(key.decode(), name.decode(), *ends)


def _append(table: GrowingTable, xml: _Xml) -> None:
    key = official_key(xml.stem)
    try:
        if key is None:
            raise ValueError("it is not named for an image of ILSVRC12")
        own_class, slash, _ = key.partition("/")
        for name, *box in parse_box_xml(xml.data, own_class if slash else None):
            table.append((key.encode(), name.encode(), *box))
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
