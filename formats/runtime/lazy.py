"""Attributes computed on first use, without a lock."""

from __future__ import annotations

import functools
from typing import Any, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - it replaces the standard one
    """``functools.cached_property`` of Python 3.12, for earlier versions.

    These hold one lock for all objects while they compute a value: a process forked in the meantime would
    wait for it forever. Without it, two threads may compute the same value.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        value = vars(instance)[str(self.attrname)] = self.func(instance)
        return value
