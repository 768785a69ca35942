"""The lines of a text file of any length, read in place."""

from __future__ import annotations

from collections.abc import Iterator

from shardprep.formats.system.regular_file import ArchiveFile

MAX_LINE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


class Lines(Iterator[str]):
    """The lines of a file of UTF-8 text, each with a newline at its end.

    ``number`` is that of the last one, and ``offset`` is where in the file the next one begins. Raises
    ValueError for other text, and for a line of more than ``limit`` bytes.
    """

    def __init__(self, file: ArchiveFile, limit: int = MAX_LINE_BYTES) -> None:
        self.number = 0
        self.offset = 0
        self._end = file.end
        self._limit = limit
        self._raw = _raw_lines(file, limit)

    def __next__(self) -> str:
        self.number += 1
        raw = next(self._raw)
        self.offset = min(self.offset + len(raw) + 1, self._end)
        if len(raw) > self._limit:
            raise ValueError(f"has more than {self._limit} bytes")
        try:
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 text at its byte {error.start}") from error
        return text + "\n"


def _raw_lines(file: ArchiveFile, limit: int) -> Iterator[bytes]:
    rest = b""
    for offset in range(0, file.end, _PIECE_BYTES):
        *whole, rest = (rest + file.read_at(_PIECE_BYTES, offset)).split(b"\n")
        yield from whole
        if len(rest) > limit:
            break
    if rest:
        yield rest
