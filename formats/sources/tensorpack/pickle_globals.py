"""The globals that Python and numpy name in the pickle of an array, and what replaces them here.

No name is imported, and nothing of numpy is called: each global makes one of the items of :mod:`.value`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .value import Array, ByteRange, Text, Value

_CORES = ("numpy.core", "numpy._core")  # up to numpy 1 and since numpy 2
_ORDERS = ("|", "<", ">")


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global name that a pickle may use."""

    name: str


@dataclass(slots=True)
class _Dtype:
    name: str
    order: str = "|"

    def __str__(self) -> str:
        return self.order + self.name


def global_name(name: str) -> GlobalName:
    """Return a global by its name. Raises ValueError with the name for all but the few that are known."""
    if name not in _CALLS:
        raise ValueError(f"its pickle asks for {name!r}, which was not run: only plain data are read")
    return GlobalName(name)


def call(value: Value, function: object, arguments: object) -> Any:
    """Return what a global makes of numpy's arguments. Raises ValueError for any other call."""
    if not isinstance(function, GlobalName) or type(arguments) is not tuple:
        raise ValueError("its pickle calls what cannot be called")
    return _CALLS[function.name](value, arguments)


def build(value: Value, item: object, state: object) -> None:
    """Give a dtype its byte order, or an array its content. Raises ValueError for any other state."""
    match item, state:
        case _Dtype(), (3, order, None, None, None, -1, -1, 0) if value.name(order) in _ORDERS:
            item.order = value.name(order)
        case Array(), (1, tuple() as shape, _Dtype() as dtype, _, ByteRange() as data):
            item.dtype, item.shape, item.data = str(dtype), shape, data
            item.check()
        case _:
            raise ValueError("its pickle sets what no array of plain numbers has")


def _unexpected(name: str) -> ValueError:
    return ValueError(f"its pickle calls {name} with other arguments than an array needs")


def _encode(value: Value, arguments: tuple[Any, ...]) -> ByteRange:
    """Return bytes as protocol 2 writes them: as the text of as many characters."""
    match arguments:
        case Text() as text, codec if value.name(codec) in ("latin1", "latin-1"):
            characters = value.read(text.start, text.length).decode()
            return ByteRange(text.start, len(characters.encode("latin-1")), latin1=True)
    raise _unexpected("_codecs.encode")


def _no_bytes(value: Value, arguments: tuple[Any, ...]) -> ByteRange:
    """Return empty bytes as protocol 2 writes them."""
    if arguments:
        raise _unexpected("bytes")
    return ByteRange(0, 0)


def _dtype(value: Value, arguments: tuple[Any, ...]) -> _Dtype:
    match arguments:
        case name, _, _:
            return _Dtype(value.name(name))
    raise _unexpected("numpy.dtype")


def _scalar(value: Value, arguments: tuple[Any, ...]) -> Array:
    match arguments:
        case _Dtype() as dtype, ByteRange() as data:
            return Array(str(dtype), (), data)
    raise _unexpected("scalar")


def _empty(value: Value, arguments: tuple[Any, ...]) -> Array:
    """Return the array of ``_reconstruct`` before its content is set."""
    match arguments:
        case GlobalName("numpy.ndarray"), (0,), _:
            return Array("|i1", (0,), ByteRange(0, 0))
    raise _unexpected("_reconstruct")


def _from_buffer(value: Value, arguments: tuple[Any, ...]) -> Array:
    match arguments:
        case ByteRange() as data, _Dtype() as dtype, tuple() as shape, _:
            return Array(str(dtype), shape, data)
    raise _unexpected("_frombuffer")


def _class(value: Value, arguments: tuple[Any, ...]) -> Any:
    raise _unexpected("numpy.ndarray")


_CALLS: dict[str, Callable[[Value, tuple[Any, ...]], Any]] = {
    "_codecs.encode": _encode,
    "__builtin__.bytes": _no_bytes,
    "numpy.dtype": _dtype,
    "numpy.ndarray": _class,
    **{f"{core}.multiarray._reconstruct": _empty for core in _CORES},
    **{f"{core}.multiarray.scalar": _scalar for core in _CORES},
    **{f"{core}.numeric._frombuffer": _from_buffer for core in _CORES},
}
