"""Batches as flat lists: tuples and dicts of arrays, taken apart and put together as a signature says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...formats.errors import UsageError


def leaves_of(signature: Any, batch: Any) -> list[Any]:
    """The parts of ``batch`` in the order of the signature's leaves. Raises UsageError where the forms differ.

    The signature decides what is a leaf, so that a list of bytes is one part and not many.
    """
    return list(_leaves(signature, batch))


def _leaves(signature: Any, batch: Any) -> Iterator[Any]:
    if isinstance(signature, Mapping):
        if not isinstance(batch, Mapping) or batch.keys() != signature.keys():
            raise UsageError(
                f"a batch should be a dict of {sorted(signature)}, and is {_form(batch)}; fix it or the signature"
            )
        for name, part in signature.items():
            yield from _leaves(part, batch[name])
    elif isinstance(signature, tuple | list):
        if not isinstance(batch, tuple | list) or len(batch) != len(signature):
            raise UsageError(
                f"a batch should have {len(signature)} parts, and is {_form(batch)}; fix it or the signature"
            )
        for part, value in zip(signature, batch, strict=True):
            yield from _leaves(part, value)
    else:
        yield batch


def packed(signature: Any, leaves: Iterator[Any]) -> Any:
    """The reverse of :func:`leaves_of`."""
    if isinstance(signature, Mapping):
        return {name: packed(part, leaves) for name, part in signature.items()}
    if isinstance(signature, tuple) and hasattr(signature, "_fields"):
        return type(signature)(*(packed(part, leaves) for part in signature))
    if isinstance(signature, tuple | list):
        return tuple(packed(part, leaves) for part in signature)
    return next(leaves)


def _form(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict of {sorted(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"one {type(batch).__name__}"
