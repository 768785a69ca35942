"""The files of each split: by the folders that they lie in, or by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS
from shardprep.formats.sources.listing.tree_files import FolderWalk, FoundFile

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""The names of splits in names of files and folders."""
OTHER_FILES = "other files"
_DATA = "data"  # where the hub of Hugging Face keeps files

_WORD = re.compile(r"[A-Za-z]+")
_OF = re.compile(r"(.*-)(\d{1,9})(-of-)(\d{1,9})(?!\d)(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class SplitFiles:
    """The files of each split, by name; their paths are relative to ``top``.

    ``ignored`` counts other files, and ``problems`` has those of files that cannot be read, such as links.
    """

    top: Path
    of_split: Mapping[str, tuple[str, ...]]
    ignored: Mapping[str, int] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def missing(self, split: str) -> str:
        """Return a phrase about missing files, by names like ``train-00003-of-01024``; empty for none."""
        series: dict[tuple[str, ...], set[int]] = {}
        for match in filter(None, map(_OF.fullmatch, self.of_split[split])):
            series.setdefault((match[1], match[3] + match[4]), set()).add(int(match[2]))
        for (before, of), numbers in sorted(series.items()):
            count = int(of.removeprefix("-of-"))
            if missing := count - len(numbers):
                first = next(number for number in range(count) if number not in numbers)
                width = len(of) - len("-of-")
                return f"{missing} of {count} files are missing, the first is {before}{first:0{width}d}{of}"
        return ""


def split_files(
    path: Path, split: str | None, names: re.Pattern[str], *, follow_symlinks: bool = False
) -> SplitFiles | None:
    """Return the files with such names at a path, or in the folder there; None if there are none.

    A file is taken for ``split``, for that of its name, or for train, and so are files without one in their
    names. Raises UsageError for a folder in which only some names have a split, and OSError.
    """
    if not path.is_dir():
        if not names.fullmatch(path.name):
            return None
        return SplitFiles(path.parent, {split or split_in(path.name) or "train": (path.name,)})
    walk = FolderWalk(path, follow_symlinks)
    ignored: Counter[str] = Counter()
    for place in ("", _DATA):
        if place in ("", *walk.folders()) and (found := _in_folder(walk, place, split, names, ignored)):
            kept = {one: found[one] for one in SPLITS if one in found}
            return SplitFiles(path, kept, +(walk.ignored + ignored), walk.problems)
    return None


def _in_folder(
    walk: FolderWalk, place: str, split: str | None, names: re.Pattern[str], ignored: Counter[str]
) -> dict[str, tuple[str, ...]]:
    folders = walk.folders(place)
    splits = [folder for folder in folders if folder in SPLIT_NAMES]
    if splits:
        return _by_folder(walk, place, splits, names, ignored)
    if set(folders) - {_DATA}:
        return {}  # class folders, and what lies beside them
    return _by_name(_matching(walk.files(place), place, names, ignored), split, walk.top)


def _by_folder(
    walk: FolderWalk, place: str, folders: Sequence[str], names: re.Pattern[str], ignored: Counter[str]
) -> dict[str, tuple[str, ...]]:
    """Return the files of each split's folder; none unless each of them has some, and no folders."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in folders:
        here = f"{place}/{folder}".lstrip("/")
        files = [] if walk.folders(here) else _matching(walk.files(here), here, names, ignored)
        split = SPLIT_NAMES[folder]
        if not files:
            return {}
        if split in found:
            raise UsageError(f"holds two folders of {split}; move one of them away", path=walk.top / place)
        found[split] = tuple(files)
    return found


def _matching(
    files: Sequence[FoundFile], place: str, names: re.Pattern[str], ignored: Counter[str]
) -> list[str]:
    found = [f"{place}/{file.path}".lstrip("/") for file in files if names.fullmatch(file.path)]
    if found and len(found) < len(files):
        ignored[OTHER_FILES] += len(files) - len(found)
    return found


def _by_name(files: Sequence[str], split: str | None, top: Path) -> dict[str, tuple[str, ...]]:
    splits = {file: split_in(file.rpartition("/")[2]) for file in files}
    without = [file for file in files if splits[file] is None]
    if files and len(without) == len(files):
        return {split or "train": tuple(files)}
    if without:
        one = next(file for file in files if splits[file])
        raise UsageError(
            f"{one} is named for a split and {without[0]} is not; rename one of them, or give a folder for each split",
            path=top,
        )
    return {one: tuple(file for file in files if splits[file] == one) for one in _each(splits)}


def _each(splits: Mapping[str, str | None]) -> Iterator[str]:
    return (split for split in SPLITS if split in splits.values())


def split_in(name: str) -> str | None:
    """Return the split that is a word of a file's name; None if there is none, or two."""
    words = {SPLIT_NAMES[word] for word in _WORD.findall(name.lower()) if word in SPLIT_NAMES}
    return words.pop() if len(words) == 1 else None
