"""The common form of results, inferred from one of them, so that workers can write whole batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from .slots import SlotField

Kind = Literal["array", "tuple", "list", "dict"]

NUMBERS = "biufc"  # kinds of dtype that a batch can have


@dataclass(frozen=True)
class RowForm:
    """The kind of a result (an array, or a tuple, list or dict of arrays or numbers), its shapes and dtypes.

    Picklable, equal by value.
    """

    kind: Kind
    fields: tuple[SlotField, ...]

    @classmethod
    def of(cls, result: Any) -> Self | None:
        """Return the form of a result; None for a result with anything but plain arrays and numbers."""
        kind, parts = _parts(result)
        if not parts or any(array is None or array.dtype.kind not in NUMBERS for array in parts.values()):
            return None
        fields = (
            SlotField(name, array.shape, array.dtype) for name, array in parts.items() if array is not None
        )
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

    def no_rows(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a batch without rows, by name."""
        return {field.name: np.empty((0, *field.shape), field.dtype) for field in self.fields}

    def made_of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Return the arrays, given by the fields' names, in this form: of one result, or of a batch.

        Of a list's parts it is a tuple.
        """
        if self.kind == "dict":
            return {field.name: arrays[field.name] for field in self.fields}
        found = tuple(arrays[field.name] for field in self.fields)
        return found[0] if self.kind == "array" else found


def _parts(result: Any) -> tuple[Kind, dict[str, npt.NDArray[Any] | None]]:
    if type(result) is dict and all(type(name) is str for name in result):
        return "dict", {name: array_of(part) for name, part in result.items()}
    if type(result) in (tuple, list):
        kind: Kind = "tuple" if type(result) is tuple else "list"
        return kind, {str(place): array_of(part) for place, part in enumerate(result)}
    return "array", {"": array_of(result)}


def array_of(part: Any) -> npt.NDArray[Any] | None:
    """Return an array as it is and a number as an array without axes; None for anything else."""
    if type(part) is np.ndarray:
        return part
    return np.asarray(part) if isinstance(part, bool | int | float | complex | np.generic) else None
