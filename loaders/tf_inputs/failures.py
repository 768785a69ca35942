"""Exceptions that have to pass through TensorFlow, which carries only their text."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from .framework import tf

_numbers = itertools.count(1)
_failures: WeakValueDictionary[int, Failure] = WeakValueDictionary()


class InputFailed(RuntimeError):
    """Stands for the source's own error within TensorFlow; :func:`original_errors` brings that back."""


class Failure:
    """A source's exception, to be found again for as long as the input that met it keeps this."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self._number = next(_numbers)
        _failures[self._number] = self

    def hand_over(self) -> BaseException | None:
        """The error, once: what it is raised through, it keeps, and that may keep the input."""
        error, self.error = self.error, None
        return error

    def stand_in(self) -> InputFailed:
        """What to raise inside of TensorFlow: the error's text, and the number to find it by."""
        text = "".join(traceback.format_exception(self.error))
        return InputFailed(f"the input failed [shardprep failure {self._number}]\n{text}")


@contextmanager
def original_errors() -> Iterator[None]:
    """Within it, an input's failure that TensorFlow reports is raised as itself, TensorFlow's error its cause.

    Needed around what TensorFlow runs for you: ``model.fit``, a ``tf.function`` that dequeues, a session's
    ``run``; iterating an input in Python raises the original anyway. Also a decorator. Thread-safe.
    """
    try:
        yield
    except tf.errors.OpError as error:
        original = original_of(error)
        if original is None:
            raise
        raise original from error


def original_of(error: BaseException) -> BaseException | None:
    """The exception that a TensorFlow error was made of, once; None for TensorFlow's own."""
    match = re.search(r"\[shardprep failure (\d+)\]", str(error))
    failure = _failures.get(int(match[1])) if match else None
    return failure.hand_over() if failure else None
