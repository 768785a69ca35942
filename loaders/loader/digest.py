"""A digest of any object: equal for objects made in the same way, in any process on any machine."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.schema import is_masked
from shardprep.loaders.transforms.contract import LibraryVersion, to_arrays

DIGEST_BYTES = 16
ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


def digest_of(value: object, *, without: tuple[type, ...] = ()) -> str:
    """Return 32 hex digits that are equal for objects made in the same way, in any process on any machine.

    Containers, arrays, tensors, dataclasses and other picklable objects are hashed by their contents;
    functions by their name, bytecode (which depends on the Python version), defaults and closure; classes by
    their name; objects with an ``identity`` by that instead. Parts of the types ``without`` count as equal.
    Raises UsageError for any other object.
    """
    return _digest(value, (), without).hex()


def _digest(value: object, above: tuple[int, ...], without: tuple[type, ...]) -> bytes:
    if isinstance(value, without):
        return _hash_parts("left out", [])
    if id(value) in above:
        return _hash_parts("cycle", [])
    if isinstance(value, set | frozenset):
        parts: Iterable[object] = map(_Literal, sorted(_digest(item, (), without) for item in value))
        kind = _name_of(type(value))
    else:
        kind, parts = _kind_and_parts(bytes(value) if isinstance(value, memoryview) else value)
    inner = (*above, id(value))
    digests = (part if isinstance(part, _Literal) else _digest(part, inner, without) for part in parts)
    return _hash_parts(kind, digests)


class _Literal(bytes):
    """Bytes that are hashed directly."""


def _hash_parts(kind: str, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _kind_and_parts(value: Any) -> tuple[str, Iterable[object]]:
    kind = str if isinstance(value, LibraryVersion) else type(value)
    if isinstance(value, ATOMS):
        return kind.__name__, [_Literal(repr(value).encode("utf-8", "backslashreplace"))]
    if isinstance(value, np.ndarray) and not is_masked(value) and not value.dtype.hasobject:
        return f"array {value.dtype.str} {value.shape}", [_Literal(value.tobytes())]
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return f"name {_name_of(value)}", []
    if isinstance(value, MethodType):
        return "method", [value.__func__, value.__self__]
    if isinstance(value, CodeType):
        version = ".".join(platform.python_version_tuple()[:2])
        return f"code {version}", [_Literal(value.co_code), value.co_names, value.co_consts]
    if isinstance(value, FunctionType):
        cells = map(_cell_contents, value.__closure__ or ())
        parts = value.__code__, value.__defaults__, value.__kwdefaults__, *cells
        return f"function {value.__qualname__}", parts
    name = _name_of(kind)
    if isinstance(value, tuple | list):
        if all(type(part) in ATOMS for part in value):
            value = [_Literal(repr(list(value)).encode("utf-8", "backslashreplace"))]
        return name, value
    if isinstance(value, Mapping):
        return name, [part for item in value.items() for part in item]
    if isinstance(value, Enum):
        return name, [value.name]
    if (identity := getattr(value, "identity", None)) is not None and not callable(identity):
        return name, [identity]
    if isinstance(array := to_arrays(value), np.ndarray) and not array.dtype.hasobject:
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


def _cell_contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _name_of(kind: Any) -> str:
    """Return the qualified name, without this package's modules: moving code must not change digests."""
    module, name = str(getattr(kind, "__module__", "")), getattr(kind, "__qualname__", kind.__name__)
    if module.startswith("shardprep."):
        return f"shardprep.{name}"
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"  # its name in spawned processes
