"""Attributes that are computed when they are first read, without a lock."""

from __future__ import annotations

import functools
from typing import Any, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - it takes the place of that one
    """``functools.cached_property`` as it is since Python 3.12.

    Before, one lock for all objects is held while a value is computed: a process that was forked meanwhile
    would wait for it forever. Two threads may compute the same value.
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
