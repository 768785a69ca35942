"""A terminal of a given size: what a program's output leaves on its screen."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

UNFINISHED = re.compile(r"\x1b(\[\d*)?\Z")  # a sequence of which the rest is not read yet
PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|(.)", re.DOTALL)


class Screen:
    """The rows of a terminal that are written to, also those that have scrolled off, as xterm keeps them."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[str] = [""]
        self._row = self._column = 0
        self._unfinished = ""

    def write(self, text: str) -> None:
        """Handle the text's characters, line ends and control sequences."""
        text = self._unfinished + text
        self._unfinished = found[0] if (found := UNFINISHED.search(text)) else ""
        for amount, command, control, character in PART.findall(text.removesuffix(self._unfinished)):
            if command:
                self._command(command, int(amount or 1))
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
            else:
                self._put(character)

    def _command(self, command: str, amount: int) -> None:
        match command:
            case "A":
                self._row = max(0, self._row - amount)
            case "J":
                self.rows[self._row] = self.rows[self._row][: self._column]
                del self.rows[self._row + 1 :]
            case _:
                raise AssertionError(f"the terminal got the sequence {command!r}, which it does not know")

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._column = 0
            self._down()
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    @property
    def text(self) -> str:
        """The rows that are not empty."""
        return "\n".join(row.rstrip() for row in self.rows if row.strip())


QUIET_S = 0.3  # without output, after which a program is taken to wait


class Terminal:
    """A program that runs on a pseudo-terminal of its own."""

    def __init__(self, program: str, *words: object, columns: int, cwd: Path | None = None) -> None:
        self.screen = Screen(columns)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ours, theirs = pty.openpty()
        self._resize(theirs, columns)
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO  # what is typed is not shown
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self.before = termios.tcgetattr(theirs)
        command = [sys.executable, "-c", program, *map(str, words)]
        environment = os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        """Send text to the program."""
        os.write(self._ours, text.encode())

    def until(self, expected: str) -> None:
        """Read until the screen has text of this pattern."""
        while not re.search(expected, self.screen.text, re.DOTALL):
            assert self._read(), f"{expected!r} was never shown:\n{self.screen.text}"

    def end(self) -> int:
        """Read the rest, and return the exit code."""
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait(timeout=240)

    def modes(self) -> list[object]:
        """The terminal's modes now."""
        return termios.tcgetattr(self._ours)

    def resize(self, columns: int) -> None:
        """Make the terminal so wide; rows that are longer are broken, as by most terminals.

        What the program has drawn for the old width is read before.
        """
        while select.select([self._ours], [], [], QUIET_S)[0]:
            self._read()
        self._resize(self._ours, columns)
        broken = Screen(columns)
        broken.write("\r\n".join(self.screen.rows))
        self.screen = broken

    @staticmethod
    def _resize(terminal: int, columns: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _read(self) -> bytes:
        try:
            part = os.read(self._ours, 1 << 16)
        except OSError:  # every process has closed the other end
            part = b""
        text = self._decoder.decode(part)
        self.written += text
        self.screen.write(text)
        return part
