"""Interruption, and failed imports: needed before anything large is imported."""

from __future__ import annotations

import signal


def load_failure(error: BaseException) -> str:
    """Return why a part of the program cannot be loaded, and what to do."""
    while error.__cause__ is not None:  # NumPy's own error is a page of advice
        error = error.__cause__
    message = f"cannot be loaded: {str(error) or 'there is not enough memory'}"
    if not isinstance(error, ImportError) or "failed to map" in message:
        message += "; give it more memory, such as by a larger ulimit -v"
    return message


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
