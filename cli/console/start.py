"""Interruption: needed before anything large is imported."""

from __future__ import annotations

import signal


class Interrupted(BaseException):
    """Raised by the first signal to unwind the program; its message includes its notes."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number  # as in a shell

    def __str__(self) -> str:
        return "; ".join((super().__str__(), *getattr(self, "__notes__", ())))
