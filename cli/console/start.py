"""Interruptions and failures of loading, needed before anything large is imported."""

from __future__ import annotations

import signal


def load_failure(error: BaseException) -> str:
    """Say why a part of the program cannot be loaded, and what to do."""
    while error.__cause__ is not None:  # NumPy's own error is a page of advice
        error = error.__cause__
    message = f"cannot be loaded: {str(error) or 'there is not enough memory'}"
    if not isinstance(error, ImportError) or "failed to map" in message:
        message += "; give it more memory, such as by a larger ulimit -v"
    return message


class Interrupted(BaseException):
    """Raised by the first signal: the stack unwinds, workers end and locks are released.

    ``number`` is the signal's. Notes follow the word in the message.
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
