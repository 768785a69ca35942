"""A source of files in class folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.listing.image_names import IMAGE_SUFFIXES
from shardprep.formats.sources.listing.tree_files import FolderWalk
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.flow.core.checks import seed_of, within
from shardprep.loaders.flow.core.length import Length, exact
from shardprep.loaders.flow.core.node import Fetched, described
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.order.displaced_order import permutation


@dataclass(frozen=True)
class FromFiles(Fetched):
    """The files FOLDER/CLASS/... at ``paths``: sorted relative paths with ``/``.

    They are sorted by code points, which is the order of their bytes in UTF-8. Keys are paths; a class's
    label is its place in ``classes``. Without a seed every pass has this order.
    """

    folder: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    seed: int | None

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, suffixes: Sequence[str] | None, seed: int | None) -> Self:
        """List the folder. Raises UsageError; SourceDamaged for an entry that is no file or folder."""
        top, endings = user_path(folder).resolve(), _endings(suffixes)
        if not top.is_dir():
            raise UsageError("is not a folder", path=folder)
        walk = FolderWalk(top)
        for file in walk.files():
            if file.path.lower().endswith(endings):
                raise UsageError("lies in no class folder; move it into one", path=top / file.path)
        classes = walk.folders()
        found = (f"{name}/{file.path}" for name in classes for file in walk.files_below(name))
        paths = sorted(path for path in found if path.lower().endswith(endings))
        walk.problems.raise_all()
        if not paths:
            raise UsageError(
                f"has no files in folders of classes that end in {', '.join(endings)}", path=folder
            )
        return cls(top, tuple(classes), tuple(paths), None if seed is None else seed_of(seed))

    @property
    def label(self) -> str:
        return "from_files"

    @property
    def description(self) -> str:
        return described(self, str(self.length), f"paths={self._digest}", f"seed={self.seed}")

    @cached_property
    def _digest(self) -> str:
        return f"{crc32(repr(self.paths).encode()):08x}"

    @property
    def length(self) -> Length:
        return exact(len(self.paths))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> FileFetch:
        return FileFetch(self.folder, self.classes)

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[str]:
        places = within(numbers, self.length)
        if self.seed is not None:
            places = map(permutation(len(self.paths), now.bits(self, self.seed)).item, places)
        return map(self.paths.__getitem__, places)


def _endings(suffixes: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(suffixes, str):
        raise UsageError(f"suffixes must be a list: give [{suffixes!r}]")
    return IMAGE_SUFFIXES if suffixes is None else tuple(suffix.lower() for suffix in suffixes)


@dataclass(frozen=True)
class FileFetch:
    """Reads files by their paths. Picklable."""

    folder: Path
    classes: tuple[str, ...]

    @contextmanager
    def open(self) -> Iterator[Callable[[str], tuple[Any, ...]]]:
        label_of = {name: label for label, name in enumerate(self.classes)}
        yield lambda path: ((self.folder / path).read_bytes(), label_of[path.partition("/")[0]])
