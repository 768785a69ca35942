"""The development kit: the classes with their ids, and the ground truth of the validation images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace
from shardprep.formats.sources.listing.text_file import read_small_file
from shardprep.formats.sources.tar.walk import walk
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.gzip_stream import GzipStream
from shardprep.formats.system.regular_file import ArchiveFile

from .mat_reader import Value, read_struct_array

FORMS = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_DEVKIT_BYTES = 64 << 20  # packed or not; the official one has 2.5 MB packed

_WNID = re.compile(r"n\d{8}", re.ASCII)
_ID = re.compile(r"\d{1,9}", re.ASCII)


class _Leaf(NamedTuple):
    wnid: str
    words: str
    number: int
    train_images: int


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
    """Read the devkit from its archive, gunzipped or not, or its folder. Raises SourceDamaged, OSError."""
    with foreign_file(path, f"download {FORMS[0]} again"):
        files = _files_of_folder(path) if path.is_dir() else _files_of_archive(path)
        for name in (META, GROUND_TRUTH):
            if name not in files:
                raise ValueError(f"holds no {name}")
        leaves = _leaves(_synsets(files[META]))
        truth = _ground_truth(files[GROUND_TRUTH], len(leaves))
        classes = LabelSpace.of(
            (leaf.wnid for leaf in leaves),
            words={leaf.wnid: leaf.words for leaf in leaves},
            ids={leaf.wnid: leaf.number for leaf in leaves},
        )
    return Devkit(classes, {leaf.wnid: leaf.train_images for leaf in leaves}, truth)


def _files_of_folder(path: Path) -> dict[str, bytes]:
    present = (name for name in (META, GROUND_TRUTH) if (path / name).exists())
    return {name: read_small_file(path / name, MAX_DEVKIT_BYTES) for name in present}


def _files_of_archive(path: Path) -> dict[str, bytes]:
    if path.stat().st_size > MAX_DEVKIT_BYTES:
        raise SourceDamaged(f"has more than {MAX_DEVKIT_BYTES} bytes; it is not the devkit", path=path)
    files: dict[str, bytes] = {}
    with _open(path) as archive:
        for member in walk(archive.read_at, archive=str(path), end=archive.end):
            name = "/".join(PurePosixPath(member.name).parts[-2:])
            if name in (META, GROUND_TRUTH):
                files[name] = archive.read_at(member.size, member.offset)
    return files


def _open(path: Path) -> ArchiveFile | GzipStream:
    return GzipStream(path, MAX_DEVKIT_BYTES) if path.suffix == ".gz" else ArchiveFile(path)


def _synsets(mat: bytes) -> list[dict[str, Value]]:
    try:
        return read_struct_array(mat, "synsets")
    except ValueError as error:
        raise ValueError(f"{META}: {error}") from error


def _leaves(synsets: list[dict[str, Value]]) -> list[_Leaf]:
    """Return the synsets without children. Raises ValueError unless their ids are 1 … n and wnids unique."""
    leaves = [_leaf(synset) for synset in synsets if _integer(synset, "num_children") == 0]
    if sorted(leaf.number for leaf in leaves) != list(range(1, len(leaves) + 1)) or not leaves:
        raise ValueError(f"{META}: the ILSVRC2012_IDs of the classes are not 1 to their number")
    if len({leaf.wnid for leaf in leaves}) < len(leaves):
        raise ValueError(f"{META}: two classes have the same WNID")
    return leaves


def _leaf(synset: Mapping[str, Value]) -> _Leaf:
    wnid, words = _text(synset, "WNID"), _text(synset, "words")
    if not _WNID.fullmatch(wnid):
        raise ValueError(f"{META}: {wnid!r} is no WNID")
    return _Leaf(wnid, words, _integer(synset, "ILSVRC2012_ID"), _integer(synset, "num_train_images"))


def _integer(synset: Mapping[str, Value], field: str) -> int:
    value = synset.get(field)
    if not isinstance(value, int | float) or not 0 <= value < 1 << 31 or not float(value).is_integer():
        raise ValueError(f"{META}: {field} is missing or not a whole number")
    return int(value)


def _text(synset: Mapping[str, Value], field: str) -> str:
    value = synset.get(field)
    if not isinstance(value, str) or len(value) > MAX_WORDS:
        raise ValueError(f"{META}: {field} is missing, not text, or longer than {MAX_WORDS} characters")
    return value


def _ground_truth(data: bytes, classes: int) -> tuple[int, ...]:
    """Read one ILSVRC2012_ID per line. Raises ValueError with the number of an invalid line."""
    lines = data.decode("ascii", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not _ID.fullmatch(line.strip()) or not 1 <= int(line) <= classes:
            raise ValueError(f"{GROUND_TRUTH}: line {number} is not a number from 1 to {classes}")
    return tuple(map(int, lines))
