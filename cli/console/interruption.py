"""The interruption of ``prep`` by a signal."""

from __future__ import annotations

import signal


class Interrupted(BaseException):
    """Raised by the first signal: the stack unwinds, workers end and locks are released.

    ``number`` is the signal's. What is added as a note follows the word in the message.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code: 128 and the signal's number, as in a shell."""
        return 128 + self.number

    def __str__(self) -> str:
        return "; ".join((super().__str__(), *getattr(self, "__notes__", ())))
