"""The decoding of an image as a check, with what the decoder says of it."""

from __future__ import annotations

import os
import tempfile

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decode_check import check_decodes
from shardprep.formats.system.owned import Owned

from .check import Checked


def check_decoding(key: bytes, image: bytes, found: Checked) -> None:
    """Decode a record's image. A crash of the decoder ends the process."""
    name = key.decode("utf-8", "replace")
    with _Stderr() as captured:
        try:
            check_decodes(image)
        except BadImage as error:
            found.problems.append((name, error.message))
            return
    if captured.text:
        found.notes.append((name, f"the decoder says: {captured.text}"))


class _Stderr(Owned):
    """Captures what a C library writes to descriptor 2, in a process that does nothing else."""

    text = ""

    def __enter__(self) -> _Stderr:
        self._file = tempfile.TemporaryFile()
        self._cached = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._cached, 2)
        os.close(self._cached)
        with self._file as file:
            file.seek(0)
            lines = file.read(4096).decode("utf-8", "replace").split("\n")
        self.text = lines[0].strip()
