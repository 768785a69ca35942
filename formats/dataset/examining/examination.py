"""The result of an examination: JSON for programs, and a page for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.system.atomic_write import save_bytes
from shardprep.formats.system.user_path import user_path

Pictures = Mapping[tuple[str, int], bytes]


@dataclass(frozen=True)
class Examination:
    """What is in a dataset.

    ``found`` is a JSON object with all that the page shows, but for the pictures of single images, which it
    names by record number. ``pictures`` are these as small JPEG files, by ("this" or "other", record number).
    """

    found: dict[str, Any]
    pictures: Pictures

    def __repr__(self) -> str:
        about, seen = self.found["dataset"], self.found["observations"]
        return f"<Examination of {about['path']!r}: {about['records']:,} records, {len(seen)} observations>"

    def to_json(self) -> dict[str, Any]:
        """Return the object ``found``."""
        return self.found

    def to_html(self) -> str:
        """Return the page: one file that needs nothing else, makes no request, and runs no program."""
        from shardprep.formats.pages.page import page  # start-up time: Jinja

        about = self.found["dataset"]
        pictures = {f"{which}:{record}": data for (which, record), data in self.pictures.items()}
        title = f"{about['path']}: {about['split']}, {about['records']:,} records"
        return page("dataset", title=title, found=self.found, pictures=pictures, mean=self._mean())

    def _mean(self) -> bytes | None:
        """Return the mean image as a PNG file."""
        from shardprep.formats.images.png_file import png_of  # start-up time: OpenCV

        pixels = self.found["pixels"]["mean_image"]
        return None if pixels is None else png_of(np.array(pixels, np.uint8))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file ``path``, which it replaces at once.

        Raises OperationError if a folder or a device is there, OSError.
        """
        save_bytes(user_path(path), self.to_html().encode())


def shown_in(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the records that a JSON object names, wherever in it they are."""
    if isinstance(value, dict):
        if value.keys() >= {"dataset", "record", "key"}:
            yield value["dataset"], value["record"]
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        yield from shown_in(part)
