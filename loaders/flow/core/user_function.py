"""Functions that are sent to other processes: by name if possible, else by value with cloudpickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.pickling import (
    INSTALL_CLOUDPICKLE,
    can_dump_by_value,
    dumps_by_value,
    dumps_noting_main,
    loads,
)

from .pass_context import PassContext


@dataclass(frozen=True)
class Function:
    """A user's function, made picklable.

    Lambdas, closures and functions of the main module need cloudpickle. Raises UsageError for an object that
    cannot be called. Pickling raises UsageError for a function that cannot be sent.
    """

    call: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise UsageError(
                f"a {type(self.call).__name__} cannot be called: give a function, not what it returns"
            )

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__qualname__", type(self.call).__qualname__))

    def __reduce__(self) -> tuple[Any, ...]:
        if _has_name(self):
            return Function, (self.call,)
        return _unpacked, (_by_value(self),)


def _has_name(function: Function) -> bool:
    """Whether another process can import the function by its name."""
    try:
        _, of_main = dumps_noting_main(function.call)
    except Exception as error:  # a lambda or closure; cloudpickle reports other reasons
        if not can_dump_by_value():
            raise UsageError(
                f"{function.name} cannot be sent to another process ({error}): {INSTALL_CLOUDPICKLE}, define it "
                "at the top level of a module, or use threads"
            ) from error
        return False
    return not (of_main and can_dump_by_value())


def _by_value(function: Function) -> bytes:
    try:
        return dumps_by_value(function.call)
    except Exception as error:
        raise UsageError(
            f"{function.name} cannot be sent to another process ({error}); what it refers to must be picklable"
        ) from error


def _unpacked(packed: bytes) -> Function:
    return Function(loads(packed))


class ErrorNote:
    """A context that adds a note with the item to an exception: "In item 17 of pass 0, at map(load)".

    StopIteration is raised as RuntimeError, because it would end the pass as if there were no more items.
    A BaseException that is no Exception, such as KeyboardInterrupt, is raised unchanged.
    """

    __slots__ = ("_item", "_now", "_step")

    def __init__(self, now: PassContext, item: int, step: str) -> None:
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


def map_with_notes(
    call: Callable[[Any], Any], items: Iterator[Any], now: PassContext, numbers: Iterator[int], step: str
) -> Iterator[Any]:
    """Yield ``call(item)`` for each item, with an ErrorNote. An item's number is drawn after the item.

    No item or result is referenced after it was yielded.
    """

    def called(item: Any, number: int) -> Any:
        with ErrorNote(now, number, step):
            return call(item)

    return map(now.here.timed(step, called), items, numbers)
