"""The files of each split: by the folders that they lie in, or by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.listing.image_names import IMAGE_SUFFIXES
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS
from shardprep.formats.sources.listing.tree_files import FolderWalk

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
    search = _Search(FolderWalk(path, follow_symlinks), FolderWalk(path, follow_symlinks), split, names)
    for place in ("", _DATA):
        if (path / place).is_dir() and (found := search.in_folder(place)):
            of_split = {one: found[one] for one in SPLITS if one in found}
            return SplitFiles(path, of_split, search.walk.ignored + search.others, search.walk.problems)
    if search.linked:  # all that is there may be links
        search.walk.problems.raise_all()
    return None


@dataclass(frozen=True)
class _Search:
    """The search for files with such names; ``probe`` looks at folders, and counts nothing."""

    walk: FolderWalk
    probe: FolderWalk
    split: str | None
    names: re.Pattern[str]
    others: Counter[str] = field(default_factory=Counter)

    def in_folder(self, place: str) -> dict[str, tuple[str, ...]]:
        """Return the files of each split; none in a folder of class folders."""
        folders = self.probe.folders(place)
        splits = [folder for folder in folders if folder in SPLIT_NAMES]
        if splits:
            return self._by_folder(place, splits)
        files = self._matching(place)
        if files and any(self._has_images(f"{place}/{folder}".lstrip("/")) for folder in folders):
            return {}  # classes, and what lies beside them
        return self._by_name(files)

    @property
    def linked(self) -> bool:
        """Whether a link has such a name."""
        places = [self.walk.top, *(self.walk.top / name for name in (_DATA, *SPLIT_NAMES))]
        found = (path for place in places if place.is_dir() for path in place.iterdir())
        return any(path.is_symlink() and self.names.fullmatch(path.name) for path in found)

    def _by_folder(self, place: str, folders: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the files of each split's folder; none unless each of them has some, and no folders."""
        found: dict[str, tuple[str, ...]] = {}
        for folder in folders:
            here = f"{place}/{folder}".lstrip("/")
            files = [] if self.probe.folders(here) else self._matching(here)
            split = SPLIT_NAMES[folder]
            if not files:
                return {}
            if split in found:
                raise UsageError(
                    f"holds two folders of {split}; move one of them away", path=self.walk.top / place
                )
            found[split] = tuple(files)
        return found

    def _matching(self, place: str) -> list[str]:
        files = self.walk.files(place)
        found = [f"{place}/{file.path}".lstrip("/") for file in files if self.names.fullmatch(file.path)]
        if found and len(found) < len(files):
            self.others[OTHER_FILES] += len(files) - len(found)
        return found

    def _has_images(self, place: str) -> bool:
        return any(file.path.lower().endswith(IMAGE_SUFFIXES) for file in self.probe.files(place))

    def _by_name(self, files: Sequence[str]) -> dict[str, tuple[str, ...]]:
        splits = {file: split_in(file.rpartition("/")[2]) for file in files}
        without = [file for file in files if splits[file] is None]
        if files and len(without) == len(files):
            return {self.split or "train": tuple(files)}
        if without:
            one = next(file for file in files if splits[file])
            raise UsageError(
                f"{one} is named for a split and {without[0]} is not; rename one of them, or give a folder for "
                "each split",
                path=self.walk.top,
            )
        found = (split for split in SPLITS if split in splits.values())
        return {split: tuple(file for file in files if splits[file] == split) for split in found}


def split_in(name: str) -> str | None:
    """Return the split that is a word of a file's name; None if there is none, or two."""
    words = {SPLIT_NAMES[word] for word in _WORD.findall(name.lower()) if word in SPLIT_NAMES}
    return words.pop() if len(words) == 1 else None
