"""Values of pickle and MessagePack, read without either library: plain data, and nothing is run.

MessagePack is read with numpy's arrays as msgpack-numpy writes them. The msgpack package is not used: it
copies every image and does not give its place, and is one more dependency for 60 lines. Extension types, and
maps of anything else, are refused.

Of pickles it knows the opcodes by which protocols 2 to 5 write lists, tuples, numbers, byte strings and
numpy's arrays, and the few globals that Python and numpy name in these. No name is imported, and nothing of
numpy is called: each global makes one of the items that are defined here. Any other opcode or global is an
error. Memory is bounded except for the items of lists: byte strings are located and not read, and the stack
and memo hold no more than a pickler needs.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from shardprep.formats.runtime.files import ReadAt

_PIECE = 512  # up to 200 bytes come before the elements of an array, and as many after them
_LONGEST_NAME = 128
_MOST_DIMENSIONS = 64  # numpy 2's limit
_NUMBERS = re.compile(r"[|<>][biufc](1|2|4|8|16)", re.ASCII)


@dataclass(slots=True)
class ByteRange:
    """``length`` bytes at ``start`` of a value; if ``latin1``, stored as the UTF-8 of as many characters."""

    start: int
    length: int
    latin1: bool = False


@dataclass(slots=True)
class Text:
    """Text: ``length`` bytes of UTF-8 at ``start`` of a value."""

    start: int
    length: int


@dataclass(slots=True)
class Array:
    """A numpy array of plain numbers, or a scalar if ``shape`` is empty. Integers have at most 16 bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: ByteRange

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError for other dtypes, such as objects, and if shape and bytes do not fit."""
        match = _NUMBERS.fullmatch(self.dtype)
        if match is None:
            raise ValueError(f"it holds an array of dtype {self.dtype!r}: only plain numbers are read")
        if len(self.shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError("it holds an array of an impossible shape")
        if math.prod(self.shape) * int(match[1]) != self.data.length:
            raise ValueError(f"it holds an array with a shape that does not fit its {self.data.length} bytes")


NewList = Callable[[], Any]
"""Makes a replacement for a list, with ``extend``, and with a type of its own or ``list``."""

Element = Callable[[Any], Any]
"""Converts an item that is put into a list. Raises ValueError for an item that must not be there."""


def unchanged(item: Any) -> Any:
    """Return an item unchanged: the default :data:`Element`."""
    return item


Plain: TypeAlias = (
    bool | int | float | Text | ByteRange | Array | list[Any] | tuple[Any, ...] | dict[str, Any] | None
)
"""The types that a value can have."""


class Value:
    """The ``length`` bytes at ``offset`` of a file, read on demand.

    ``piece`` is the number of bytes that are read at once. Not thread-safe.
    """

    def __init__(self, read_at: ReadAt, offset: int, length: int, *, piece: int = _PIECE) -> None:
        self.offset, self.length = offset, length
        self._read_at, self._most = read_at, piece
        self._start, self._piece = 0, b""

    def in_pieces_of(self, piece: int) -> Value:
        """Return the same value, read in pieces of another size."""
        return Value(self._read_at, self.offset, self.length, piece=piece)

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ValueError if there are not as many; OSError."""
        at = start - self._start
        if at < 0 or at + length > len(self._piece):
            self._fetch(start, length)
            at = 0
        return self._piece[at : at + length]

    def byte(self, start: int) -> int:
        """Return one byte, for readers that go from one to the next."""
        at = start - self._start
        return self._piece[at] if 0 <= at < len(self._piece) else self.read(start, 1)[0]

    def _fetch(self, start: int, length: int) -> None:
        wanted = min(max(length, self._most), self.length - start)
        if wanted < length:
            raise ValueError("it is cut off")
        self._start, self._piece = start, self._read_at(wanted, self.offset + start)
        if len(self._piece) < wanted:
            raise ValueError("the file ends within it")

    def bytes_of(self, stretch: ByteRange) -> bytes:
        """Return the bytes of a range."""
        if not stretch.latin1:
            return self.read(stretch.start, stretch.length)
        stored = min(2 * stretch.length, self.length - stretch.start)
        return from_latin1(self.read(stretch.start, stored), stretch.length)

    def name(self, item: object) -> str:
        """Return short ASCII text, or Python 2's byte string of it. Raises ValueError for anything else."""
        if not isinstance(item, Text | ByteRange) or item.length > _LONGEST_NAME:
            raise ValueError("it has something else where a name should be")
        return self.read(item.start, item.length).decode("ascii")


def from_latin1(stored: bytes, length: int) -> bytes:
    """Return the ``length`` bytes stored as the UTF-8 of as many characters; the rest is ignored."""
    return stored.decode(errors="replace")[:length].encode("latin-1")


def kind_of(item: object) -> str:
    """Return a description of an item for messages."""
    match item:
        case Array(dtype, ()):
            return f"a number of dtype {dtype}"
        case Array(dtype, shape):
            return f"an array of dtype {dtype} and shape {shape}"
        case ByteRange():
            return f"{item.length} bytes"
        case Text():
            return "text"
        case list() | tuple() | array():
            return f"a {type(item).__name__} of {len(item)}"
        case dict():
            return f"a dict of {', '.join(item)}"
        case None | bool():
            return str(item)
        case int() | float():
            return f"a number ({type(item).__name__})"
    return "a name of numpy's"


MSGPACK_FIRST_BYTES = tuple(
    bytes([code]) for code in (*range(0x81, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF)
)  # maps and arrays

_MAX_DEPTH = 4  # of a datapoint, its array and the array's shape
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_MSGPACK_NUMBERS = dict(zip((*range(0xCA, 0xD0), *range(0xD0, 0xD4)), "fdBHIQbhiq", strict=True))
_ARRAY = {"nd", "type", "kind", "shape", "data"}


def unpack(
    value: Value,
    *,
    most: int,
    new_list: NewList = list,
    element: Element = unchanged,
    dicts: bool = False,
) -> Plain:
    """Return the plain data of the value, which has at most ``most`` items; ``dicts`` are read or refused.

    Raises ValueError, with what was found, if it is damaged or describes more than plain data.
    """
    reader = _Reader(value, most, new_list, element, dicts)
    plain = cast(Plain, reader.item(0))
    if reader.at != value.length:
        raise ValueError("it is damaged: something follows its end")
    return plain


class _Cursor:
    """A place in a value, from which its bytes are read on."""

    def __init__(self, value: Value) -> None:
        self._value, self.at = value, 0

    def skip(self, length: int) -> int:
        """Skip the next ``length`` bytes, and return their start."""
        start = self.at
        if length > self._value.length - start:
            raise ValueError("it is cut off")
        self.at += length
        return start

    def take(self, length: int) -> bytes:
        return self._value.read(self.skip(length), length)

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]


class _Reader(_Cursor):
    def __init__(self, value: Value, most: int, new_list: NewList, element: Element, dicts: bool) -> None:
        super().__init__(value)
        self._left, self._dicts = most, dicts
        self._new_list, self._element = new_list, element

    def item(self, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it has more items than an image with its label")
        code = self.number(">B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _MSGPACK_NUMBERS:
            return self.number(f">{_MSGPACK_NUMBERS[code]}")
        for first, last, read, mask in _SHORT:
            if first <= code <= last:
                return read(self, code & mask, depth)
        if code not in _LONG:
            raise ValueError(f"it is damaged, or of an extension type (0x{code:02x} at byte {self.at - 1})")
        read, layout = _LONG[code]
        return read(self, self.number(f">{layout}"), depth)

    def _text(self, length: int, depth: int) -> Text:
        return Text(self.skip(length), length)

    def _bytes(self, length: int, depth: int) -> ByteRange:
        return ByteRange(self.skip(length), length)

    def _list(self, count: int, depth: int) -> Any:
        made = self._new_list()
        made.extend(self._element(self.item(depth + 1)) for _ in range(count))
        return made

    def _map(self, count: int, depth: int) -> Array | dict[str, Any]:
        """Read a map: an array or a scalar of numpy, or a dict with names as keys."""
        parts: dict[str, Any] = {}
        for _ in range(count):
            name = self._value.name(self.item(depth + 1))
            parts[name] = self.item(depth + 1)
        if self._dicts and "nd" not in parts:
            return parts
        if not {"nd", "type", "data"} <= parts.keys() <= _ARRAY:
            raise ValueError("it holds a dict")
        match parts.get("shape", []), parts.get("kind", ByteRange(0, 0)), parts["data"]:
            case list() as shape, ByteRange(length=0), ByteRange() as data:
                return Array(self._value.name(parts["type"]), tuple(shape), data)
        raise ValueError("it holds an array of more than plain numbers")


_Read = Callable[[_Reader, int, int], Any]
_SHORT: tuple[tuple[int, int, _Read, int], ...] = (
    (0x80, 0x8F, _Reader._map, 0x0F),
    (0x90, 0x9F, _Reader._list, 0x0F),
    (0xA0, 0xBF, _Reader._text, 0x1F),
)
_LONG: dict[int, tuple[_Read, str]] = {
    **{0xC4 + n: (_Reader._bytes, layout) for n, layout in enumerate("BHI")},
    **{0xD9 + n: (_Reader._text, layout) for n, layout in enumerate("BHI")},
    **{0xDC + n: (_Reader._list, layout) for n, layout in enumerate("HI")},
    **{0xDE + n: (_Reader._map, layout) for n, layout in enumerate("HI")},
}

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
    name = _CALLS[function.name]
    match name, arguments:
        case "_codecs.encode", (Text() as text, codec) if value.name(codec) in ("latin1", "latin-1"):
            # bytes as protocol 2 writes them: as the text of as many characters
            characters = value.read(text.start, text.length).decode()
            return ByteRange(text.start, len(characters.encode("latin-1")), latin1=True)
        case "bytes", ():  # empty bytes as protocol 2 writes them
            return ByteRange(0, 0)
        case "numpy.dtype", (dtype, _, _):
            return _Dtype(value.name(dtype))
        case "scalar", (_Dtype() as dtype, ByteRange() as data):
            return Array(str(dtype), (), data)
        case "_reconstruct", (GlobalName("numpy.ndarray"), (0,), _):  # its content is set later
            return Array("|i1", (0,), ByteRange(0, 0))
        case "_frombuffer", (ByteRange() as data, _Dtype() as dtype, tuple() as shape, _):
            return Array(str(dtype), shape, data)
    raise ValueError(f"its pickle calls {name} with other arguments than an array needs")


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


_CALLS = {
    "_codecs.encode": "_codecs.encode",
    "__builtin__.bytes": "bytes",
    "numpy.dtype": "numpy.dtype",
    "numpy.ndarray": "numpy.ndarray",
    **{f"{core}.multiarray._reconstruct": "_reconstruct" for core in _CORES},
    **{f"{core}.multiarray.scalar": "scalar" for core in _CORES},
    **{f"{core}.numeric._frombuffer": "_frombuffer" for core in _CORES},
}
"""The globals that a pickle may use, each with its name in messages."""

PICKLE_FIRST_BYTES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))

_INST, _STOP = b"i."
_LONGEST_INTEGER = 16

_MAX_STACK = 1 << 12  # picklers put 1,000 items on the stack, and then append them
_MAX_MEMO = 1 << 12  # the first items; later ones are items of lists, which are not used again
_REFUSED = {
    **dict.fromkeys(b"}dsu", "a dict"),
    **dict.fromkeys(b"\x8f\x90\x91", "a set"),
    **dict.fromkeys(b"PQ", "an object by its persistent id"),
    **dict.fromkeys(b"\x82\x83\x84", "a class by its number in the extension registry"),
    **dict.fromkeys(b"io\x81\x92", "an instance of a class"),
    **dict.fromkeys(b"\x97\x98", "a buffer that lies elsewhere"),
}


def unpickle(
    value: Value,
    *,
    most: int,
    new_list: NewList = list,
    element: Element = unchanged,
    dicts: bool = False,
) -> Plain:
    """Return the plain data of the pickle, which has at most ``most`` opcodes; ``dicts`` are read or refused.

    Raises ValueError, with what was found, if it is damaged or describes more than plain data.
    """
    return _Machine(value, new_list, element, dicts).run(most)


class _Machine(_Cursor):
    def __init__(self, value: Value, new_list: NewList, element: Element, dicts: bool) -> None:
        super().__init__(value)
        self._opcodes = _OPCODES | _OF_DICTS if dicts else _OPCODES
        self._new_list, self._element = new_list, element
        self._list_type = type(new_list())
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._puts = 0

    def run(self, most: int) -> Plain:
        for _ in range(most):
            code = self._value.byte(self.at)
            self.at += 1
            if code == _STOP:
                return self._result()
            if code not in self._opcodes:
                raise self._refused(code)
            operation, argument = self._opcodes[code]
            operation(self, argument)
            if len(self._stack) + len(self._marks) > _MAX_STACK:
                raise ValueError("its pickle has more items on the stack than a pickler uses")
        raise ValueError(f"its pickle has more than {most} opcodes, and an image with its label needs fewer")

    def _result(self) -> Plain:
        if self._marks or len(self._stack) != 1 or self.at != self._value.length:
            raise ValueError("its pickle is damaged: it ends before it is complete")
        return cast(Plain, self._stack[0])

    def _refused(self, code: int) -> ValueError:
        if code == _INST:
            global_name(f"{self._line()}.{self._line()}")
        if code in _REFUSED:
            return ValueError(f"its pickle asks for {_REFUSED[code]}: only plain data are read")
        return ValueError(
            f"its pickle is damaged: 0x{code:02x} at byte {self.at - 1} is no opcode known here"
        )

    def _count(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def _line(self) -> str:
        line = self._value.read(self.at, min(_LONGEST_NAME, self._value.length - self.at))
        end = line.find(b"\n")
        if end < 0:
            raise ValueError("its pickle is damaged: a name does not end")
        self.at += end + 1
        return line[:end].decode("ascii", errors="backslashreplace")

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle is damaged: it pops more than it pushed")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle is damaged: a mark is missing")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _push(self, item: Any) -> None:
        self._stack.append(item)

    def _number(self, layout: str) -> None:
        self._push(self.number(layout))

    def _long(self, size: int) -> None:
        length = self._count(size)
        if length > _LONGEST_INTEGER:
            raise ValueError(f"it holds an integer of {length} bytes")
        self._push(int.from_bytes(self.take(length), "little", signed=True))

    def _bytes(self, size: int) -> None:
        length = self._count(size)
        self._push(ByteRange(self.skip(length), length))

    def _text(self, size: int) -> None:
        length = self._count(size)
        self._push(Text(self.skip(length), length))

    def _tuple(self, count: int) -> None:
        self._push(tuple([self._pop() for _ in range(count)][::-1]))

    def _mark(self, _: None) -> None:
        self._marks.append(len(self._stack))

    def _tuple_to_mark(self, _: None) -> None:
        self._push(tuple(self._pop_to_mark()))

    def _empty_list(self, _: None) -> None:
        self._push(self._new_list())

    def _append(self, _: None) -> None:
        self._extend([self._pop()])

    def _append_to_mark(self, _: None) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        into = self._pop()
        if type(into) is not self._list_type:
            raise ValueError("its pickle is damaged: it appends to what is no list")
        into.extend(map(self._element, items))
        self._push(into)

    def _empty_dict(self, _: None) -> None:
        self._push({})

    def _set(self, _: None) -> None:
        item, name = self._pop(), self._pop()
        self._update([name, item])

    def _set_to_mark(self, _: None) -> None:
        self._update(self._pop_to_mark())

    def _dict_to_mark(self, _: None) -> None:
        items = self._pop_to_mark()
        self._push({})
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        into = self._pop()
        if type(into) is not dict or len(items) % 2:
            raise ValueError("its pickle is damaged: it sets what is no part of a dict")
        into.update(
            (self._value.name(name), item) for name, item in zip(items[::2], items[1::2], strict=True)
        )
        self._push(into)

    def _put(self, size: int) -> None:
        """Store the top item in the memo; picklers count up, so any other number is damage."""
        number = self._count(size)
        if number == 1 and not self._puts:
            self._memo.append(None)  # Python 2's cPickle begins with 1
            self._puts = 1
        if number != self._puts:
            raise ValueError("its pickle is damaged: it does not count what it puts")
        self._memoize(None)

    def _memoize(self, _: None) -> None:
        item = self._pop()
        if self._puts < _MAX_MEMO:
            self._memo.append(item)
        self._puts += 1
        self._stack.append(item)

    def _get(self, size: int) -> None:
        number = self._count(size)
        if number >= len(self._memo):
            raise ValueError("its pickle is damaged: it gets a memo item that it never put")
        self._push(self._memo[number])

    def _global(self, _: None) -> None:
        module, name = self._line(), self._line()
        self._push(global_name(f"{module}.{name}"))

    def _stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        self._push(global_name(f"{self._value.name(module)}.{self._value.name(name)}"))

    def _call(self, _: None) -> None:
        arguments, function = self._pop(), self._pop()
        self._push(call(self._value, function, arguments))

    def _build(self, _: None) -> None:
        state, item = self._pop(), self._pop()
        build(self._value, item, state)
        self._push(item)


_OPCODES: dict[int, tuple[Callable[[_Machine, Any], object], Any]] = {
    0x80: (_Machine.skip, 1),  # PROTO
    0x95: (_Machine.skip, 8),  # FRAME
    ord("N"): (_Machine._push, None),
    0x88: (_Machine._push, True),
    0x89: (_Machine._push, False),
    ord("K"): (_Machine._number, "<B"),  # BININT1, and below BININT2, BININT, BINFLOAT
    ord("M"): (_Machine._number, "<H"),
    ord("J"): (_Machine._number, "<i"),
    ord("G"): (_Machine._number, ">d"),
    0x8A: (_Machine._long, 1),  # LONG1, LONG4
    0x8B: (_Machine._long, 4),
    ord("C"): (_Machine._bytes, 1),  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
    ord("B"): (_Machine._bytes, 4),
    0x8E: (_Machine._bytes, 8),
    0x96: (_Machine._bytes, 8),
    ord("U"): (_Machine._bytes, 1),  # SHORT_BINSTRING, BINSTRING: bytes of Python 2
    ord("T"): (_Machine._bytes, 4),
    0x8C: (_Machine._text, 1),  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
    ord("X"): (_Machine._text, 4),
    0x8D: (_Machine._text, 8),
    ord(")"): (_Machine._tuple, 0),
    0x85: (_Machine._tuple, 1),
    0x86: (_Machine._tuple, 2),
    0x87: (_Machine._tuple, 3),
    ord("("): (_Machine._mark, None),
    ord("t"): (_Machine._tuple_to_mark, None),
    ord("]"): (_Machine._empty_list, None),
    ord("a"): (_Machine._append, None),
    ord("e"): (_Machine._append_to_mark, None),
    ord("q"): (_Machine._put, 1),  # BINPUT, LONG_BINPUT
    ord("r"): (_Machine._put, 4),
    0x94: (_Machine._memoize, None),
    ord("h"): (_Machine._get, 1),  # BINGET, LONG_BINGET
    ord("j"): (_Machine._get, 4),
    ord("c"): (_Machine._global, None),  # GLOBAL, STACK_GLOBAL
    0x93: (_Machine._stack_global, None),
    ord("R"): (_Machine._call, None),  # REDUCE, BUILD
    ord("b"): (_Machine._build, None),
}

_OF_DICTS: dict[int, tuple[Callable[[_Machine, Any], object], Any]] = {
    ord("}"): (_Machine._empty_dict, None),
    ord("s"): (_Machine._set, None),
    ord("u"): (_Machine._set_to_mark, None),
    ord("d"): (_Machine._dict_to_mark, None),
}
