"""A file descriptor that is closed once, since its number may be another file's afterwards."""

from __future__ import annotations

import os

from .owned import Owned


class Descriptor(Owned):
    """A descriptor that is closed once, at the latest by the finalizer, only in the process that opened it.

    In a forked copy of that process the number may be another file's: a daemon closes all descriptors that
    it inherited. Closing takes no lock.
    """

    _number = -1

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the number; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor. Idempotent; does nothing in a forked copy of the process that opened it."""
        number, self._number = self._number, -1
        if number >= 0 and self.made_here:
            os.close(number)

    def __del__(self) -> None:
        self.close()
