"""The batches of a source with their parts converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from .passes import Passes, Source, end

NUMBERS = "biufc"  # kinds of dtype: what a framework has tensors of

Convert = Callable[[Any], Any]


class Conversion:
    """The batches of ``source``, one epoch per iteration, each part converted by ``convert``.

    Tuples, named tuples, lists and dicts are kept; everything else is a part. Errors are raised unchanged. An
    epoch that is left early is not continued. Not thread-safe.
    """

    def __init__(self, source: Source, convert: Convert) -> None:
        self._passes = Passes(source)
        self._convert = convert

    def __len__(self) -> int:
        """Number of batches of the next iteration. Raises TypeError where the source has no length."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Any]:
        return self._run(self._passes.begin())

    def _run(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            # `map`, because a loop variable would hold a batch while the next is made
            yield from map(partial(converted, convert=self._convert), batches)
        finally:
            end(batches)


def converted(batch: Any, convert: Convert) -> Any:
    """Return the batch in the same form, with its parts converted."""
    if isinstance(batch, Mapping):
        return {name: converted(part, convert) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(converted(part, convert) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(converted(part, convert) for part in batch)
    return convert(batch)
