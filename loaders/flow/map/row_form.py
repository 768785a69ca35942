"""The common form of results, inferred from one of them, so that workers can write whole batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shardprep.loaders.buffers.slots import Field

NUMBERS = "biufc"  # kinds of dtype that a batch can have


@dataclass(frozen=True)
class RowForm:
    """The kind of a result (an array, or a tuple or dict of arrays or numbers), with its shapes and dtypes.

    Picklable, equal by value.
    """

    kind: Literal["array", "tuple", "dict"]
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, result: Any) -> Self | None:
        """Return the form of a result; None for a result with anything but plain arrays and numbers."""
        kind, parts = _parts(result)
        if not parts or any(array is None or array.dtype.kind not in NUMBERS for array in parts.values()):
            return None
        fields = (Field(name, array.shape, array.dtype) for name, array in parts.items() if array is not None)
        return cls(kind, tuple(fields))

    def arrays_of(self, result: Any) -> list[npt.NDArray[Any]] | None:
        """Return the result's arrays; None if it has another form."""
        kind, parts = _parts(result)
        if kind != self.kind or list(parts) != [field.name for field in self.fields]:
            return None
        arrays = list(parts.values())
        for array, field in zip(arrays, self.fields, strict=True):
            if array is None or array.shape != field.shape or array.dtype != field.dtype:
                return None
        return arrays  # type: ignore[return-value]

    def made_of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Return the arrays, given by the fields' names, in this form: of one result, or of a batch."""
        if self.kind == "dict":
            return {field.name: arrays[field.name] for field in self.fields}
        found = tuple(arrays[field.name] for field in self.fields)
        return found if self.kind == "tuple" else found[0]


def _parts(result: Any) -> tuple[Literal["array", "tuple", "dict"], dict[str, npt.NDArray[Any] | None]]:
    if type(result) is dict and all(type(name) is str for name in result):
        return "dict", {name: _array(part) for name, part in result.items()}
    if type(result) in (tuple, list):
        return "tuple", {str(place): _array(part) for place, part in enumerate(result)}
    return "array", {"": _array(result)}


def _array(part: Any) -> npt.NDArray[Any] | None:
    if type(part) is np.ndarray:
        return part
    return np.asarray(part) if isinstance(part, bool | int | float | complex | np.generic) else None
