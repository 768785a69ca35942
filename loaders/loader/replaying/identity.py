"""The identity of a loader's batches, as text that can be compared between machines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.errors import UsageError
from shardprep.formats.images.opencv import cv2
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.transforms.contract import Transform
from shardprep.loaders.transforms.tensor_results import in_arrays

DIGEST_BYTES = 16
ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


class RowWork(Protocol):
    """What a loader does with each record, as far as its batches depend on it."""

    @property
    def label_map(self) -> tuple[int, ...]: ...
    @property
    def skip_bad(self) -> bool: ...
    @property
    def columns(self) -> tuple[ColumnEntry, ...]: ...
    @property
    def with_image(self) -> bool: ...
    @property
    def transform(self) -> Transform | None: ...


def loader_identity(plan: EpochPlan, work: RowWork, *, with_numbers: bool) -> dict[str, str]:
    """The values that determine a loader's batches, by name."""
    found = {
        "dataset": plan.dataset,
        "shuffle": json.dumps(plan.shuffle.to_json() if plan.shuffle else None),
        "seed": str(plan.seed),
        "batch size": str(plan.batch_size),
        "drop_last": str(plan.drop_last),
        "rank": f"{plan.rank} of {plan.world_size}",
        "labels": digest_of(work.label_map),
        "record numbers": str(with_numbers),
        "bad records": "skipped" if work.skip_bad else "raised",
        "transform": "none",
    }
    if work.columns or not work.with_image:
        found["columns"] = json.dumps([work.with_image, *(entry.field.to_json() for entry in work.columns)])
    if work.transform is not None:
        found["transform"] = f"{_title(work.transform)} {digest_of(work.transform)}"
        found["OpenCV"] = cv2.__version__  # the decoder
    return found


def digest_of(value: object) -> str:
    """32 hex digits that are equal for objects made in the same way, in any process on any machine.

    Containers, arrays, tensors, dataclasses and other picklable objects are hashed by their contents;
    functions by their name, bytecode (so the Python version counts, too), defaults and closure; classes by
    their name. An object with an ``identity`` is hashed by that instead. Raises UsageError for an object
    without any of these.
    """
    return _digest(value, ()).hex()


def _digest(value: object, above: tuple[int, ...]) -> bytes:
    if id(value) in above:
        return _joined("cycle", [])
    inner = (*above, id(value))
    kind, parts = _parts(value)
    return _joined(
        kind, (part if isinstance(part, _Literal) else _Literal(_digest(part, inner)) for part in parts)
    )


class _Literal(bytes):
    """Bytes that are hashed directly."""


def _joined(kind: str, parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(kind.encode(), digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _parts(value: Any) -> tuple[str, Iterable[object]]:
    """The kind of a value, and its parts."""
    kind = type(value)
    if isinstance(value, ATOMS):
        return kind.__name__, [_Literal(repr(value).encode("utf-8", "backslashreplace"))]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype.str} {value.shape}", [_Literal(value.tobytes())]
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return f"name {_name_of(value)}", []
    if isinstance(value, FunctionType | MethodType | CodeType):
        return _parts_of_code(value)
    if isinstance(value, tuple | list):
        is_flat = all(type(part) in ATOMS for part in value)
        return _name_of(kind), [
            _Literal(repr(list(value)).encode("utf-8", "backslashreplace"))
        ] if is_flat else value
    if isinstance(value, Mapping):
        return _name_of(kind), [part for item in value.items() for part in item]
    if isinstance(value, set | frozenset):
        return _name_of(kind), map(_Literal, sorted(_digest(item, ()) for item in value))
    return _parts_of_object(value)


def _parts_of_code(value: Any) -> tuple[str, Iterable[object]]:
    if isinstance(value, MethodType):
        return "method", [value.__func__, value.__self__]
    if isinstance(value, CodeType):
        version = ".".join(platform.python_version_tuple()[:2])
        return f"code {version}", [_Literal(value.co_code), value.co_names, value.co_consts]
    cells = map(_content, value.__closure__ or ())
    return f"function {value.__qualname__}", [
        value.__code__,
        value.__defaults__,
        value.__kwdefaults__,
        *cells,
    ]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _parts_of_object(value: Any) -> tuple[str, Iterable[object]]:
    name = _name_of(type(value))
    if isinstance(value, Enum):
        return name, [value.name]
    if (identity := getattr(value, "identity", None)) is not None and not callable(identity):
        return name, [identity]
    if isinstance(array := in_arrays(value), np.ndarray) and not array.dtype.hasobject:
        return f"array of {name}", [array]  # a tensor's pickle has more than its values
    if dataclasses.is_dataclass(value):
        return name, [getattr(value, field.name) for field in dataclasses.fields(value)]
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise UsageError(
            f"a {name} cannot be compared with another one ({error}); state what determines the batches by "
            "identity=..."
        ) from error
    if isinstance(reduced, str):
        return name, [reduced]
    return name, [list(part) if hasattr(part, "__next__") else part for part in reduced]


def _title(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _name_of(kind: Any) -> str:
    """The qualified name; without the module for this package's names, so that a move keeps digests equal."""
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__qualname__", kind.__name__)
    return f"shardprep.{name}" if str(module).startswith("shardprep.") else f"{module}.{name}"
