"""Values of pickle and MessagePack, read without either library: plain data, and nothing is run.

MessagePack is read with numpy's arrays as msgpack-numpy writes them; its package copies every image and does
not give its place. Pickles are those of protocols 2 to 5 of lists, tuples, numbers, byte strings and numpy's
arrays, with the few globals that Python and numpy name in these: none is imported, and each makes one of the
items that are defined here. Anything else is an error. Memory is bounded except for the items of lists: byte
strings are located and not read, and the stack and memo hold no more than a pickler needs.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardprep.formats.runtime.files import ReadAt

_PIECE = 512  # up to 200 bytes come before the elements of an array, and as many after them
_LONGEST_NAME = 128
_MOST_DIMENSIONS = 64  # numpy 2's limit
_PLAIN_DTYPE = re.compile(r"[|<>][biufc](1|2|4|8|16)", re.ASCII)


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
        match = _PLAIN_DTYPE.fullmatch(self.dtype)
        if match is None:
            raise ValueError(f"it holds an array of dtype {self.dtype!r}: only plain numbers are read")
        if len(self.shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError("it holds an array of an impossible shape")
        if math.prod(self.shape) * int(match[1]) != self.data.length:
            raise ValueError(f"it holds an array with a shape that does not fit its {self.data.length} bytes")


NumberOf = Callable[[Any], int]
"""Converts an item of a list of numbers, which is read as an array. Raises ValueError for any other item."""


class Value:
    """The ``length`` bytes at ``offset`` of a file, read on demand.

    ``piece`` is the least number of bytes that are read at once. Not thread-safe.
    """

    def __init__(self, read_at: ReadAt, offset: int, length: int, *, piece: int = _PIECE) -> None:
        self.offset, self.length, self.piece = offset, length, piece
        self._read_at = read_at
        self._start, self._piece = 0, b""

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ValueError if there are not as many; OSError."""
        at = start - self._start
        if at < 0 or at + length > len(self._piece):
            wanted = min(max(length, self.piece), self.length - start)
            if wanted < length:
                raise ValueError("it is cut off")
            at, self._start, self._piece = 0, start, self._read_at(wanted, self.offset + start)
            if len(self._piece) < wanted:
                raise ValueError("the file ends within it")
        return self._piece[at : at + length]

    def byte(self, start: int) -> int:
        """Return one byte, for readers that go from one to the next."""
        at = start - self._start
        return self._piece[at] if 0 <= at < len(self._piece) else self.read(start, 1)[0]

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


class _Reader:
    """A place in a value from which its bytes are read on, and the lists and dicts that are made of them."""

    def __init__(self, value: Value, dicts: bool, number_of: NumberOf | None) -> None:
        self.at = 0
        self._value, self._dicts, self._number_of = value, dicts, number_of

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

    def new_list(self) -> list[Any] | array[int]:
        return [] if self._number_of is None else array("q")

    def extend(self, into: list[Any] | array[int], items: Iterable[Any]) -> None:
        into.extend(items if self._number_of is None else map(self._number_of, items))


MSGPACK_FIRST_BYTES = tuple(
    bytes([code]) for code in (*range(0x81, 0xA0), *range(0xDC, 0xE0))
)  # maps, arrays
_MAX_DEPTH = 4  # of a datapoint, its array and the array's shape
_ARRAY = {"nd", "type", "kind", "shape", "data"}
_MSGPACK: dict[int, tuple[str, Any]] = {
    **{code: ("number", code) for code in range(0x80)},
    **{code: ("number", code - 0x100) for code in range(0xE0, 0x100)},
    0xC0: ("number", None),
    0xC2: ("number", False),
    0xC3: ("number", True),
    **{0xCA + n: ("number", layout) for n, layout in enumerate("fdBHIQbhiq")},
    **{0x80 + n: ("map", n) for n in range(16)},
    **{0x90 + n: ("list", n) for n in range(16)},
    **{0xA0 + n: ("text", n) for n in range(32)},
    **{0xC4 + n: ("bytes", layout) for n, layout in enumerate("BHI")},
    **{0xD9 + n: ("text", layout) for n, layout in enumerate("BHI")},
    **{0xDC + n: ("list", layout) for n, layout in enumerate("HI")},
    **{0xDE + n: ("map", layout) for n, layout in enumerate("HI")},
}
"""What each code begins, and its value or length, or how that is stored."""


def unpack(value: Value, *, most: int, dicts: bool = False, number_of: NumberOf | None = None) -> Any:
    """Return the plain data of the value, which has at most ``most`` items; ``dicts`` are read or refused.

    Raises ValueError, which names the problem, if it is damaged or describes more than plain data.
    """
    reader = _Unpacker(value, dicts, number_of)
    reader.left = most
    plain = reader.item(0)
    if reader.at != value.length:
        raise ValueError("it is damaged: something follows its end")
    return plain


class _Unpacker(_Reader):
    left: int  # items

    def item(self, depth: int) -> Any:
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it has more items than an image with its label")
        code = self.number(">B")
        if code not in _MSGPACK:
            raise ValueError(f"it is damaged, or of an extension type (0x{code:02x} at byte {self.at - 1})")
        kind, size = _MSGPACK[code]
        length = self.number(f">{size}") if isinstance(size, str) else size
        match kind:
            case "number":
                return length
            case "text":
                return Text(self.skip(length), length)
            case "bytes":
                return ByteRange(self.skip(length), length)
            case "map":
                return self._map(length, depth)
        made = self.new_list()
        self.extend(made, (self.item(depth + 1) for _ in range(length)))
        return made

    def _map(self, count: int, depth: int) -> Array | dict[str, Any]:
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


GLOBALS = {
    "_codecs.encode": "_codecs.encode",
    "__builtin__.bytes": "bytes",
    "numpy.dtype": "numpy.dtype",
    "numpy.ndarray": "numpy.ndarray",
    **{f"{core}.multiarray._reconstruct": "_reconstruct" for core in _CORES},
    **{f"{core}.multiarray.scalar": "scalar" for core in _CORES},
    **{f"{core}.numeric._frombuffer": "_frombuffer" for core in _CORES},
}
"""The globals that a pickle may use, each with its name in messages."""


def _global(name: str) -> GlobalName:
    if name not in GLOBALS:
        raise ValueError(f"its pickle asks for {name!r}, which was not run: only plain data are read")
    return GlobalName(name)


def _call(value: Value, function: object, arguments: object) -> Any:
    """Return the value that a global of numpy makes of the arguments. Raises ValueError for other calls."""
    if not isinstance(function, GlobalName) or type(arguments) is not tuple:
        raise ValueError("its pickle calls what cannot be called")
    name = GLOBALS[function.name]
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


def _build(value: Value, item: object, state: object) -> None:
    """Give a dtype its byte order, or an array its content. Raises ValueError for any other state."""
    match item, state:
        case _Dtype(), (3, order, None, None, None, -1, -1, 0) if value.name(order) in _ORDERS:
            item.order = value.name(order)
        case Array(), (1, tuple() as shape, _Dtype() as dtype, _, ByteRange() as data):
            item.dtype, item.shape, item.data = str(dtype), shape, data
            item.check()
        case _:
            raise ValueError("its pickle sets what no array of plain numbers has")


PICKLE_FIRST_BYTES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
_LONGEST_INTEGER = 16
_MAX_STACK = 1 << 12  # picklers put 1,000 items on the stack, and then append them
_MAX_MEMO = 1 << 12  # the first items; later ones are items of lists, which are not used again
_WITH_ARGUMENT: dict[str, tuple[str, Any]] = {
    "N": ("number", None),
    "\x88": ("number", True),
    "\x89": ("number", False),
    "K": ("number", "<B"),
    "M": ("number", "<H"),
    "J": ("number", "<i"),
    "G": ("number", ">d"),
    "\x8a": ("integer", "<B"),
    "\x8b": ("integer", "<I"),
    "C": ("bytes", "<B"),
    "B": ("bytes", "<I"),
    "\x8e": ("bytes", "<Q"),
    "\x96": ("bytes", "<Q"),
    "U": ("bytes", "<B"),
    "T": ("bytes", "<I"),  # of Python 2
    "\x8c": ("text", "<B"),
    "X": ("text", "<I"),
    "\x8d": ("text", "<Q"),
    "q": ("put", "<B"),
    "r": ("put", "<I"),
    "h": ("get", "<B"),
    "j": ("get", "<I"),
    "\x80": ("skip", 1),
    "\x95": ("skip", 8),  # the protocol, and a frame
}
"""What an opcode does with its argument, and its value, or how it or its length is stored."""

_TUPLES = {")": 0, "\x85": 1, "\x86": 2, "\x87": 3}
_OF_DICTS = "}dsu"
_REFUSED = {
    **dict.fromkeys(_OF_DICTS, "a dict"),
    **dict.fromkeys("\x8f\x90\x91", "a set"),
    **dict.fromkeys("PQ", "an object by its persistent id"),
    **dict.fromkeys("\x82\x83\x84", "a class by its number in the extension registry"),
    **dict.fromkeys("io\x81\x92", "an instance of a class"),
    **dict.fromkeys("\x97\x98", "a buffer that lies elsewhere"),
}


def unpickle(value: Value, *, most: int, dicts: bool = False, number_of: NumberOf | None = None) -> Any:
    """Return the plain data of the pickle, which has at most ``most`` opcodes; ``dicts`` are read or refused.

    Raises ValueError, which names the problem, if it is damaged or describes more than plain data.
    """
    machine = _Machine(value, dicts, number_of)
    for _ in range(most):
        code = chr(value.byte(machine.at))
        machine.at += 1
        if code == ".":
            return machine.result()
        machine.step(code)
    raise ValueError(f"its pickle has more than {most} opcodes, and an image with its label needs fewer")


def _damaged(reason: str) -> ValueError:
    return ValueError(f"its pickle is damaged: {reason}")


class _Machine(_Reader):
    def __init__(self, value: Value, dicts: bool, number_of: NumberOf | None) -> None:
        super().__init__(value, dicts, number_of)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._puts = 0

    def result(self) -> Any:
        if self._marks or len(self._stack) != 1 or self.at != self._value.length:
            raise _damaged("it ends before it is complete")
        return self._stack[0]

    def step(self, code: str) -> None:
        """Carry out an opcode: here the ones that are followed by what they push."""
        kind, stored = _WITH_ARGUMENT.get(code, ("", None))
        argument = self.number(stored) if isinstance(stored, str) else stored
        match kind:
            case "number":
                self._stack.append(argument)
            case "bytes":
                self._stack.append(ByteRange(self.skip(argument), argument))
            case "text":
                self._stack.append(Text(self.skip(argument), argument))
            case "put":
                self._put(argument)
            case "get" if argument >= len(self._memo):
                raise _damaged("it gets a memo item that it never put")
            case "get":
                self._stack.append(self._memo[argument])
            case "skip":
                self.skip(argument)
            case "integer" if argument > _LONGEST_INTEGER:
                raise ValueError(f"it holds an integer of {argument} bytes")
            case "integer":
                self._stack.append(int.from_bytes(self.take(argument), "little", signed=True))
            case _:
                self._combine(code)
        if len(self._stack) + len(self._marks) > _MAX_STACK:
            raise ValueError("its pickle has more items on the stack than a pickler uses")

    def _combine(self, code: str) -> None:
        if code in _OF_DICTS and not self._dicts:
            raise self._refused(code)
        match code:
            case "(":
                self._marks.append(len(self._stack))
                return
            case "]":
                made: Any = self.new_list()
            case "}":
                made = {}
            case ")" | "\x85" | "\x86" | "\x87" | "t":
                made = tuple(self._pop_to_mark() if code == "t" else self._pop(_TUPLES[code]))
            case "a" | "e":
                items = self._pop(1) if code == "a" else self._pop_to_mark()
                (made,) = self._pop(1)
                if not isinstance(made, list | array):
                    raise _damaged("it appends to what is no list")
                self.extend(made, items)
            case "d" | "s" | "u":
                items = self._pop(2) if code == "s" else self._pop_to_mark()
                made = {} if code == "d" else self._pop(1)[0]
                if type(made) is not dict or len(items) % 2:
                    raise _damaged("it sets what is no part of a dict")
                pairs = zip(items[::2], items[1::2], strict=True)
                made.update((self._value.name(name), item) for name, item in pairs)
            case "\x94":
                self._put(self._puts)
                return
            case "c":
                made = _global(f"{self._line()}.{self._line()}")
            case "\x93":
                made = _global(".".join(map(self._value.name, self._pop(2))))
            case "R":
                made = _call(self._value, *self._pop(2))
            case "b":
                made, state = self._pop(2)
                _build(self._value, made, state)
            case _:
                raise self._refused(code)
        self._stack.append(made)

    def _refused(self, code: str) -> ValueError:
        if code == "i":  # INST, with a global's name
            _global(f"{self._line()}.{self._line()}")
        if code in _REFUSED:
            return ValueError(f"its pickle asks for {_REFUSED[code]}: only plain data are read")
        return _damaged(f"0x{ord(code):02x} at byte {self.at - 1} is no opcode known here")

    def _line(self) -> str:
        line = self._value.read(self.at, min(_LONGEST_NAME, self._value.length - self.at))
        end = line.find(b"\n")
        if end < 0:
            raise _damaged("a name does not end")
        self.at += end + 1
        return line[:end].decode("ascii", errors="backslashreplace")

    def _pop(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise _damaged("it pops more than it pushed")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise _damaged("a mark is missing")
        return self._pop(len(self._stack) - self._marks.pop())

    def _put(self, number: int) -> None:
        if number == 1 and not self._puts:
            self._memo.append(None)  # Python 2's cPickle begins with 1
            self._puts = 1
        if number != self._puts:  # picklers count up
            raise _damaged("it does not count what it puts")
        (item,) = self._pop(1)
        if self._puts < _MAX_MEMO:
            self._memo.append(item)
        self._puts += 1
        self._stack.append(item)


_ARROW = re.compile(rb"(?:[\0-\x08]\0\0\0){2}")  # the numbers of tensors and arrays


def decoded(value: Value, *, most: int, dicts: bool = False, number_of: NumberOf | None = None) -> Any:
    """Return the plain data of a value of either kind, like :func:`unpickle` and :func:`unpack`."""
    head = value.read(0, min(8, value.length))
    if head.startswith(PICKLE_FIRST_BYTES):
        return unpickle(value, most=most, dicts=dicts, number_of=number_of)
    if head.startswith(MSGPACK_FIRST_BYTES):
        return unpack(value, most=most, dicts=dicts, number_of=number_of)
    if _ARROW.fullmatch(head):
        raise ValueError(
            "it was serialized by pyarrow, in a format that pyarrow gave up; load it with the pyarrow of its "
            "time, set TENSORPACK_SERIALIZE=pickle"
        )
    raise ValueError(f"it is neither a pickle of protocol 2 to 5 nor msgpack (starts with {head.hex(' ')})")
