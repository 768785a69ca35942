"""Items to save, and a comparison of two items."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)

NUMBER = 60


def made(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """An item with a random part, and an array with a size of its own."""
    return {
        "points": rng.random((number % 4, 2), np.float32),
        "name": f"grün {number}",
        "data": bytes(500) + bytes([number]),
        "about": [number, None],
    }


def are_same(one: Any, other: Any) -> bool:
    """Whether two items are equal in every type, dtype, shape and byte."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other) or (one != one and other != other)
