"""Functions on their way to other processes: by name where that will do, by value where cloudpickle can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...formats.errors import UsageError
from ..trusted import can_dump_by_value, dumps_by_value, dumps_noting_main, loads


@dataclass(frozen=True)
class Function:
    """A user's function, which pickles. Lambdas, closures and what is defined in the main module need cloudpickle.

    Raises UsageError for what cannot be called. Pickling raises it where a function cannot be sent.
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
    """Whether another process finds it by its name."""
    try:
        _, of_main = dumps_noting_main(function.call)
    except Exception as error:  # lambdas and closures; what else it may be, cloudpickle says
        if not can_dump_by_value():
            raise UsageError(
                f"{function.name} cannot be sent to another process ({error}): install cloudpickle, define it at "
                "the top level of a module, or use threads"
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
