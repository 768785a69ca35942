"""The headers of a flat tar, read at many places at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardprep.formats.sources.tar.header import BLOCK, Header, parse_header
from shardprep.formats.system.regular_file import ReadAt

from .remote_archive import HEADERS_AT_ONCE, RemoteArchive

SEGMENT_BYTES = 16 << 20  # the least that a segment has
WINDOW_BYTES = 256 << 10  # read at a time to find a segment's first header

_MAGIC, _MAGIC_AT = b"ustar", 257


def headers_ahead(archive: RemoteArchive) -> ReadAt:
    """Return the archive's ``read_at``, for a walk, which finds most headers there already.

    A chain of headers is one answer after the other. So the archive is cut into segments; in each, all at
    once, what looks like a header is found, and the chain from there is read. The walk decides which of these
    blocks it uses: those at the offsets that its own chain leads to. Others, such as a tar within an image,
    change nothing.
    """
    count = max(1, min(HEADERS_AT_ONCE, archive.end // SEGMENT_BYTES))
    starts = [archive.end * number // count // BLOCK * BLOCK for number in range(count)]
    known: dict[int, bytes] = {}
    for blocks in archive.mapped(lambda segment: _chain(archive, *segment), pairwise([*starts, archive.end])):
        known.update(blocks)

    def read_at(length: int, offset: int) -> bytes:
        block = known.pop(offset, None) if length == BLOCK else None
        return archive.read_at(length, offset) if block is None else block

    return read_at


def _chain(archive: RemoteArchive, start: int, stop: int) -> dict[int, bytes]:
    """Return the blocks of a segment from the first header that is found to what is none, by offset."""
    blocks: dict[int, bytes] = {}
    at = start if start == 0 else _first_header(archive, start, stop)
    while at < stop:
        block = archive.read_at(BLOCK, at)
        blocks[at] = block
        header = _header(block)
        if header is None:
            break
        at += BLOCK + -(-header.size // BLOCK) * BLOCK
    return blocks


def _first_header(archive: RemoteArchive, start: int, stop: int) -> int:
    for at in range(start, stop, WINDOW_BYTES):
        window = archive.read_at(min(WINDOW_BYTES, stop - at), at)
        found = next((place for place in _marked(window) if _header(window[place : place + BLOCK])), None)
        if found is not None:
            return at + found
    return stop


def _marked(window: bytes) -> Iterator[int]:
    """Yield the places of the blocks that have the magic of a header."""
    return (
        place
        for place in range(0, len(window) - BLOCK + 1, BLOCK)
        if window.startswith(_MAGIC, place + _MAGIC_AT)
    )


def _header(block: bytes) -> Header | None:
    if len(block) < BLOCK:
        return None
    try:
        return parse_header(block)
    except ValueError:
        return None
