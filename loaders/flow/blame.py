"""Where a user's function was when it raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from .running import Pass


class Blame:
    """A context that adds to an exception which item it came from: "In item 17 of pass 0, at map(load)".

    StopIteration comes out as a RuntimeError, since it would end the pass as if there were no more items.
    What is no Exception, such as KeyboardInterrupt, passes as it is.
    """

    __slots__ = ("_item", "_now", "_step")

    def __init__(self, now: Pass, item: int, step: str) -> None:
        self._now = now
        self._item = item
        self._step = step

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StopIteration):
            stopped = RuntimeError(f"{self._step} raised StopIteration")
            stopped.add_note(self._note)
            raise stopped from error
        if isinstance(error, Exception):
            error.add_note(self._note)

    @property
    def _note(self) -> str:
        return f"In item {self._item} of pass {self._now.number}, at {self._step}"


def blamed(
    call: Callable[[Any], Any], items: Iterator[Any], now: Pass, numbers: Iterator[int], step: str
) -> Iterator[Any]:
    """``call(item)`` of each item, whose number is drawn after it; nothing is held once it was yielded."""

    def called(item: Any, number: int) -> Any:
        with Blame(now, number, step):
            return call(item)

    return map(called, items, numbers)
