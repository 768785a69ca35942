"""Lines at the end of a terminal that stay in place while the program prints above them."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from tqdm.utils import disp_len, disp_trim

from shardprep.formats.system.owned import Owned

FALLBACK = os.terminal_size((80, 24))
UP = "\x1b[{}A"
ERASE_BELOW = "\x1b[J"


class TerminalBlock(Owned):
    """Some lines below everything that is printed. Several blocks stand one below the other.

    What the program writes to ``sys.stdout`` and ``sys.stderr``, by ``print`` or a logger, moves the lines
    down. The cursor stays below them, so that a program that is killed leaves a usable terminal. Each line
    is cut to the terminal's width. Thread-safe.
    """

    def __init__(self) -> None:
        self._screen = _Screen.current()
        self._screen.put(self, ())

    @property
    def width(self) -> int:
        """Characters of a line."""
        return self._screen.size.columns - 1

    @property
    def is_unicode(self) -> bool:
        """Whether the terminal shows more than ASCII."""
        return self._screen.encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32")

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines instead of those before."""
        if self.made_here:
            self._screen.put(self, lines)

    def close(self) -> None:
        """Remove the lines; what was printed stays. Idempotent."""
        if self.made_here:
            self._screen.drop(self)


class _Screen:
    """The blocks of the terminal at stderr."""

    _now: _Screen | None = None

    @classmethod
    def current(cls) -> _Screen:
        """Return the screen of the present ``sys.stderr``."""
        now = cls._now
        if now is None or now.terminal is not sys.stderr:
            now = cls._now = cls(sys.stderr)
        return now

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.encoding = getattr(terminal, "encoding", None) or "ascii"
        self._write: Callable[[str], int] = terminal.write
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._blocks: dict[TerminalBlock, Sequence[str]] = {}
        self._drawn: list[str] = []
        self._line_is_open = False  # the program has printed a part of a line, which lines would cut in two
        self._watched: list[TextIO] = []

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows now; the user may change them at any time."""
        try:
            size = os.get_terminal_size(self.terminal.fileno())
        except (OSError, ValueError):
            return FALLBACK
        return size if size.columns and size.lines else FALLBACK

    def put(self, block: TerminalBlock, lines: Sequence[str]) -> None:
        with self._lock:
            if not self._blocks:
                self._watch()
            self._blocks[block] = lines
            self._draw()

    def drop(self, block: TerminalBlock) -> None:
        with self._lock:
            if self._blocks.pop(block, None) is None:
                return
            self._draw()
            if not self._blocks:
                self._leave()

    def _draw(self) -> None:
        """Replace the lines that are shown; none are while the program is within a line."""
        size, erased = self.size, self._erased()
        lines = [line for lines in self._blocks.values() for line in lines]
        shown = [] if self._line_is_open else [str(disp_trim(line, size.columns - 1)) for line in lines]
        self._drawn = shown[: size.lines - 1]
        self._send(erased + "".join(f"{line}\n" for line in self._drawn))

    def _erased(self) -> str:
        """Return what removes the shown lines; a narrower terminal has broken them into more rows."""
        columns = self.size.columns
        rows = sum(max(1, math.ceil(disp_len(line) / columns)) for line in self._drawn)
        self._drawn = []
        return f"\r{UP.format(rows)}{ERASE_BELOW}" if rows else ""

    def _send(self, text: str) -> None:
        if text:
            self._write(text)
            self.terminal.flush()

    def _watch(self) -> None:
        """See what is written to the streams, also by loggers that hold them already."""
        for stream in dict.fromkeys((sys.stderr, sys.stdout)):
            if stream is self.terminal or stream.isatty():
                with suppress(AttributeError):  # of a stream without attributes
                    stream.write = self._above(stream, stream.write)  # type: ignore[method-assign]
                    self._watched.append(stream)

    def _leave(self) -> None:
        for stream in self._watched:
            with suppress(AttributeError):
                del stream.write
        self._watched = []

    def _above(self, stream: TextIO, write: Callable[[str], int]) -> Callable[[str], int]:
        """Return a ``write`` that removes the lines, writes, and shows them below."""

        def write_above(text: str) -> int:
            if not text or os.getpid() != self._pid:  # a forked process knows nothing of what is shown
                return write(text)
            with self._lock:
                self._send(self._erased())
                written = write(text)
                stream.flush()
                self._line_is_open = not text.endswith("\n")
                self._draw()
            return written

        return write_above
