"""Exceptions that pass through TensorFlow, which keeps only their text."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from shardprep.loaders.tf_inputs.tensors.framework import tf

_numbers = itertools.count(1)
_failures: WeakValueDictionary[int, SourceFailure] = WeakValueDictionary()


class InputFailed(RuntimeError):
    """Stands for the source's error within TensorFlow; :func:`original_errors` raises the original."""


class SourceFailure:
    """A source's exception, which can be found by its number while the input keeps this object."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self._number = next(_numbers)
        _failures[self._number] = self

    def take_error(self) -> BaseException | None:
        """Return the error, once. Its traceback refers to frames, which may keep the input alive."""
        error, self.error = self.error, None
        return error

    def as_input_failed(self) -> InputFailed:
        """Return the exception to raise within TensorFlow, with the error's text and number."""
        text = "".join(traceback.format_exception(self.error))
        return InputFailed(f"the input failed [shardprep failure {self._number}]\n{text}")


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise the original exception of an input in place of TensorFlow's, which becomes its cause.

    A context manager and a decorator, for code that TensorFlow runs: ``model.fit``, a ``tf.function`` that
    dequeues, a session's ``run``. Iterating an input in Python raises the original without it. Thread-safe.
    """
    try:
        yield
    except tf.errors.OpError as error:
        original = original_of(error)
        if original is None:
            raise
        raise original from error


def original_of(error: BaseException) -> BaseException | None:
    """Return the exception behind a TensorFlow error, once; None for TensorFlow's own errors."""
    match = re.search(r"\[shardprep failure (\d+)\]", str(error))
    failure = _failures.get(int(match[1])) if match else None
    return failure.take_error() if failure else None
