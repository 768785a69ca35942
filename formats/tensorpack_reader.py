"""Images read out of a tensorpack LMDB in which protocol 2 of pickle stored them as text."""

from __future__ import annotations

import numpy as np

from .errors import SourceDamaged
from .tar_reader import TarReader
from .tensorpack_value import from_latin1


class TextReader(TarReader):
    """Reads each byte where it was stored as a character of UTF-8; an entry's length is that of the image."""

    def read(self, entry: np.void) -> bytes:
        if self._file is None:
            raise ValueError("the reader is closed")
        length = int(entry["length"])
        try:
            return from_latin1(self._file.read_at(2 * length, int(entry["offset"])), length)
        except ValueError as error:
            raise SourceDamaged(
                f"holds no bytes there: {error}; copy it again", path=self.where(entry)
            ) from None
