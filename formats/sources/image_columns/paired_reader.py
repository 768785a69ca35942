"""The reader of images and of their partners in other folders."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.schema import PLAIN
from shardprep.formats.sources.listing.source import ByteReader
from shardprep.formats.sources.listing.tree_reader import TreeReader


def pair_columns(number: int) -> tuple[str, str, str]:
    """Return the names of the entries' columns with the path, size and time of a partner."""
    return f"path_{number}", f"length_{number}", f"mtime_ns_{number}"


@dataclass
class PairedReader(ByteReader):
    """Reader of images, and of the partner of each in every folder of ``partners``."""

    images: TreeReader
    partners: tuple[TreeReader, ...]
    _opened: ExitStack | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> PairedReader:
        with ExitStack() as stack:  # a copy of this reader shares its parts, so that it opens others
            self.images = replace(self.images)
            self.partners = tuple(map(replace, self.partners))
            for one in (self.images, *self.partners):
                stack.enter_context(one)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def read(self, entry: np.void) -> bytes:
        return self.images.read(entry)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        return tuple(_image(partner, entry) for partner in self.partners)

    def where(self, entry: np.void) -> str:
        return self.images.where(entry)


def _image(partner: TreeReader, entry: np.void) -> bytes:
    try:
        return PLAIN["image"].encode(partner.read(entry))
    except BadValue as error:
        raise BadValue(f"{partner.where(entry)}: {error.message}") from error
