"""Plain data in pickle and MessagePack, read without either library and without running anything.

Byte strings are located but not read; msgpack's own package would copy every image and not give its place.
MessagePack may have numpy arrays as written by msgpack-numpy. Pickles of protocols 2 to 5 may have lists,
tuples, dicts, numbers, byte strings and numpy arrays, with the few globals that Python and numpy use for
these; none is imported, and each makes one of the items defined here. Anything else is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.record_files import ByteWindow, Cursor

MAX_BYTES = 2 * MAX_IMAGE_BYTES + 4096  # protocol 2 stores most bytes as two
MAX_PARTS = 1 << 12  # opcodes or items of a value; an image with its label has at most 105
MAX_LEVELS = 8
_LONGEST_NAME = 128
_LONGEST_INTEGER = 16
_MAX_DIMENSIONS = 64  # numpy 2's limit
_PLAIN_DTYPE = re.compile(r"[|<>](b1|[iu][1248]|f[248]|c8|c16)", re.ASCII)


@dataclass(slots=True)
class ByteRange:
    """``length`` bytes at ``start`` of the file; if ``latin1``, each is stored as a character of UTF-8."""

    start: int
    length: int
    latin1: bool = False


@dataclass(slots=True)
class Text:
    """``length`` bytes of UTF-8 at ``start`` of the file; ``characters`` are counted at most once."""

    start: int
    length: int
    characters: int | None = None


@dataclass(slots=True)
class Array:
    """A numpy array of plain numbers, or a scalar if ``shape`` is empty.

    ``shape`` is that of the data in C order, which are then transposed to ``axes``, if there are any.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteRange
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for other dtypes, such as objects, and if the shape does not fit the bytes."""
        if not _PLAIN_DTYPE.fullmatch(self.dtype):
            raise ValueError(f"it holds an array of dtype {self.dtype!r}: only plain numbers are read")
        if len(self.shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError("it holds an array of an impossible shape")
        are_numbers = all(type(axis) is int for axis in self.axes)
        if self.axes and (not are_numbers or sorted(self.axes) != [*range(len(self.shape))]):
            raise ValueError("it holds an array with impossible axes")
        if math.prod(self.shape) * int(self.dtype[2:]) != self.data.length:
            raise ValueError(f"it holds an array with a shape that does not fit its {self.data.length} bytes")


def read_bytes(window: ByteWindow, place: ByteRange) -> bytes:
    start, length = place.start, place.length
    if not place.latin1:
        return window.take(start, start + length)
    return from_latin1(window.take(start, min(start + 2 * length, window.end)), length)


def read_name(window: ByteWindow, item: object) -> str:
    """Read short ASCII text, or Python 2's byte string of it. Raises ValueError for anything else."""
    if isinstance(item, Text | ByteRange) and item.length <= _LONGEST_NAME:
        name = window.take(item.start, item.start + item.length)
        if name.isascii():
            return name.decode()
    raise ValueError(f"a name in it is not text of at most {_LONGEST_NAME} ASCII characters")


def from_latin1(stored: bytes, length: int) -> bytes:
    """Return ``length`` bytes, each stored as a character of UTF-8; ignore the rest."""
    return stored.decode(errors="replace")[:length].encode("latin-1")


def read_line(cursor: Cursor) -> str:
    """Read the short text up to the next newline, and skip that."""
    window = cursor.window
    rest = window.take(cursor.at, min(cursor.at + _LONGEST_NAME, window.end))
    text, end, _ = rest.partition(b"\n")
    if not end:
        raise ValueError("its pickle is damaged: a name does not end")
    cursor.skip(len(text) + 1)
    return text.decode("ascii", errors="backslashreplace")


_CONTAINERS = (*range(0x81, 0xA0), *range(0xDC, 0xE0))  # codes of maps and arrays
MSGPACK_FIRST_BYTES = tuple(bytes([code]) for code in _CONTAINERS)
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
"""The kind of each code, and its value or length, or the layout of these."""


def unpack(window: ByteWindow) -> Any:
    """Return the plain data in MessagePack. Raises ValueError if it is damaged or has other data."""
    cursor, left = Cursor(window), MAX_PARTS

    def item(depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_LEVELS:
            raise ValueError(f"it has more than {MAX_PARTS} items, or more than {MAX_LEVELS} levels")
        code = cursor.read_number(">B")
        if code not in _MSGPACK:
            raise ValueError(f"it is damaged, or of an extension type (0x{code:02x} at byte {cursor.at - 1})")
        kind, size = _MSGPACK[code]
        length = cursor.read_number(f">{size}") if isinstance(size, str) else size
        match kind:
            case "text":
                return Text(cursor.skip(length), length)
            case "bytes":
                return ByteRange(cursor.skip(length), length)
            case "list":
                return [item(depth + 1) for _ in range(length)]
            case "map":
                parts = {}
                for _ in range(length):
                    name = read_name(window, item(depth + 1))
                    parts[name] = item(depth + 1)
                return _array(parts) if "nd" in parts else parts
        return length

    def _array(parts: dict[str, Any]) -> Array:
        match parts.get("shape", []), parts.get("kind", ByteRange(0, 0)), parts.get("data"):
            case list() as shape, ByteRange(length=0), ByteRange() as data:
                return Array(read_name(window, parts.get("type")), tuple(shape), data)
        raise ValueError("it holds an array of more than plain numbers")

    plain = item(0)
    if cursor.at != window.end:
        raise ValueError("it is damaged: something follows its end")
    return plain


_CORES = ("numpy.core", "numpy._core")  # up to numpy 1 and since numpy 2
_ORDERS = ("|", "<", ">")


@dataclass(frozen=True, slots=True)
class GlobalName:
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
"""The globals that a pickle may use, with their short names."""


def _check_global(name: str) -> GlobalName:
    if name not in GLOBALS:
        raise ValueError(f"its pickle asks for {name!r}, which was not run: only plain data is read")
    return GlobalName(name)


def _call(window: ByteWindow, function: object, arguments: object) -> Any:
    """Return the result of calling a global. Raises ValueError for any other call."""
    match isinstance(function, GlobalName) and GLOBALS[function.name], arguments:
        case "_codecs.encode", (Text() as text, codec) if read_name(window, codec) in ("latin1", "latin-1"):
            # bytes as protocol 2 writes them: as text with a character for each
            if text.characters is None:  # a pickle may name one long text a thousand times
                stored = window.take(text.start, text.start + text.length)
                text.characters = len(stored.decode().encode("latin-1"))
            return ByteRange(text.start, text.characters, latin1=True)
        case "bytes", ():  # empty bytes as protocol 2 writes them
            return ByteRange(0, 0)
        case "numpy.dtype", (dtype, _, _):
            return _Dtype(read_name(window, dtype))
        case "scalar", (_Dtype() as dtype, ByteRange() as data):
            return Array(str(dtype), (), data)
        case "_reconstruct", (GlobalName("numpy.ndarray"), (0,), _):  # its content is set later
            return Array("|i1", (0,), ByteRange(0, 0))
        case "_frombuffer", (ByteRange() as data, _Dtype() as dtype, tuple() as shape, order, *axes):
            match read_name(window, order), axes:
                case "C" | "F" as name, []:
                    return _make_array(dtype, shape, data, is_fortran=name == "F")
                case "K", [tuple() as axis_order]:
                    return Array(str(dtype), shape, data, axis_order)
    raise ValueError("its pickle makes a call that plain data does not need")


def _make_array(dtype: _Dtype, shape: tuple[int, ...], data: ByteRange, *, is_fortran: bool) -> Array:
    axes = tuple(range(len(shape)))[::-1] if is_fortran else ()
    return Array(str(dtype), shape[::-1] if is_fortran else shape, data, axes)


def _build(window: ByteWindow, item: object, state: object) -> None:
    """Set a dtype's byte order or an array's content. Raises ValueError for any other state."""
    match item, state:
        case _Dtype(), (3, order, None, None, None, -1, -1, 0) if read_name(window, order) in _ORDERS:
            item.order = read_name(window, order)
        case Array(), (1, tuple() as shape, _Dtype() as dtype, bool() as is_fortran, ByteRange() as data):
            array = _make_array(dtype, shape, data, is_fortran=is_fortran)
            item.dtype, item.shape, item.data, item.axes = array.dtype, array.shape, data, array.axes
        case _:
            raise ValueError("its pickle sets a state that no array of plain numbers has")


PICKLE_FIRST_BYTES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
_MARK = object()
_OPCODES: dict[str, tuple[str, Any]] = {
    "N": ("number", None),
    "\x88": ("number", True),
    "\x89": ("number", False),
    "K": ("number", "<B"),
    "M": ("number", "<H"),
    "J": ("number", "<i"),
    "G": ("number", ">d"),
    "\x8a": ("integer", "<B"),
    "C": ("bytes", "<B"),
    "B": ("bytes", "<I"),
    "\x96": ("bytes", "<Q"),
    "U": ("bytes", "<B"),
    "T": ("bytes", "<I"),  # of Python 2
    "\x8c": ("text", "<B"),
    "X": ("text", "<I"),
    "q": ("put", "<B"),
    "r": ("put", "<I"),
    "h": ("get", "<B"),
    "j": ("get", "<I"),
    "\x80": ("skip", 1),
    "\x95": ("skip", 8),  # the protocol, and a frame
    ")": ("tuple", 0),
    "\x85": ("tuple", 1),
    "\x86": ("tuple", 2),
    "\x87": ("tuple", 3),
}
"""The action of an opcode, and its argument, or the layout of the argument or its length."""


def unpickle(window: ByteWindow) -> Any:
    """Return the plain data in a pickle. Raises ValueError if it is damaged or has other data."""
    cursor, memo = Cursor(window), dict[int, Any]()
    stack: list[Any] = []

    def pop_items(count: int) -> list[Any]:
        return [stack.pop() for _ in range(count)][::-1]

    def pop_to_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def step(code: str) -> None:
        kind, stored = _OPCODES.get(code, (code, None))
        argument = cursor.read_number(stored) if isinstance(stored, str) else stored
        match kind:
            case "number":
                stack.append(argument)
            case "integer" if argument <= _LONGEST_INTEGER:
                stack.append(int.from_bytes(cursor.take(argument), "little", signed=True))
            case "bytes":
                stack.append(ByteRange(cursor.skip(argument), argument))
            case "text":
                stack.append(Text(cursor.skip(argument), argument))
            case "put":
                memo[argument] = stack[-1]
            case "\x94":
                memo[len(memo)] = stack[-1]
            case "get":
                stack.append(memo[argument])
            case "skip":
                cursor.skip(argument)
            case "tuple":
                stack.append(tuple(pop_items(argument)))
            case "t":
                stack.append(tuple(pop_to_mark()))
            case "(":
                stack.append(_MARK)
            case "]":
                stack.append([])
            case "a" | "e":
                items = pop_items(1) if code == "a" else pop_to_mark()
                if not isinstance(stack[-1], list):
                    raise ValueError("its pickle is damaged: it appends to something other than a list")
                stack[-1].extend(items)
            case "}":
                stack.append({})
            case "s" | "u":
                items = pop_items(2) if code == "s" else pop_to_mark()
                if not isinstance(stack[-1], dict) or len(items) % 2:
                    raise ValueError("its pickle is damaged: it sets items of something other than a dict")
                for name, item in zip(items[::2], items[1::2], strict=True):
                    stack[-1][read_name(window, name)] = item
            case "c":
                stack.append(_check_global(f"{read_line(cursor)}.{read_line(cursor)}"))
            case "\x93":
                stack.append(_check_global(".".join(read_name(window, item) for item in pop_items(2))))
            case "R":
                stack.append(_call(window, *pop_items(2)))
            case "b":
                (state,) = pop_items(1)
                _build(window, stack[-1], state)
            case _:
                raise ValueError(f"its pickle asks for more than plain data (opcode 0x{ord(code):02x})")

    for _ in range(MAX_PARTS):
        code = chr(cursor.take(1)[0])
        if code == ".":
            if len(stack) != 1 or cursor.at != window.end:
                raise ValueError("its pickle is damaged: it ends before it is complete")
            return stack[0]
        try:
            step(code)
        except (IndexError, KeyError) as error:
            raise ValueError("its pickle is damaged: it uses an item that is not there") from error
    raise ValueError(f"its pickle has more than {MAX_PARTS} opcodes")


def decode_plain(window: ByteWindow) -> Any:
    """Return the plain data in a pickle or MessagePack. Raises ValueError for anything else."""
    if window.length > MAX_BYTES:
        raise ValueError(f"it has {window.length} bytes, too many for an image or a value")
    head = window.take(window.start, min(window.start + 2, window.end))
    if head.startswith(PICKLE_FIRST_BYTES):
        return unpickle(window)
    if head.startswith(MSGPACK_FIRST_BYTES):
        return unpack(window)
    raise ValueError(
        "it is neither a pickle of protocol 2 to 5 nor msgpack; if tensorpack serialized it with pyarrow, as up to "
        "2018, load it with the pyarrow of that time and set TENSORPACK_SERIALIZE=pickle"
    )
