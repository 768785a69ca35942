"""Functions on their way to other processes: by name where that will do, by value where cloudpickle can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...formats.errors import UsageError
from ..trusted import dumps, loads


@dataclass(frozen=True)
class Function:
    """A user's function, which pickles. Lambdas, closures and what is defined in the main module need cloudpickle.

    Pickling raises UsageError where a function cannot be sent.
    """

    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__qualname__", type(self.call).__qualname__))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (_packed(self),)


def _packed(function: Function) -> bytes:
    try:
        by_name = dumps(function.call)
        if b"__main__" not in by_name:
            return by_name
    except Exception as error:
        return _by_value(function, error)
    try:
        return _by_value(function, None)
    except UsageError:
        return by_name


def _by_value(function: Function, error: Exception | None) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            f"{function.name} cannot be sent to another process ({error}): install cloudpickle, define it at the "
            "top level of a module, or use threads"
        ) from error
    try:
        return bytes(cloudpickle.dumps(function.call))
    except Exception as failure:
        raise UsageError(
            f"{function.name} cannot be sent to another process ({failure}); what it refers to must be picklable"
        ) from failure


def _unpacked(packed: bytes) -> Function:
    return Function(loads(packed))
