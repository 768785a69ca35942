"""Packages as tables of names, each of which is imported when it is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: The package's ``__name__``.
        names: The names that each module has for the package, by the module's full name.
    """
    homes = {name: home for home, own in names.items() for name in own}
    scope = vars(sys.modules[package])

    def value_of(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        scope[name] = getattr(import_module(homes[name]), name)
        return scope[name]

    def listed() -> list[str]:
        return sorted({*scope, *homes})

    return value_of, listed
