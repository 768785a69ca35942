"""The reader of pickles of plain data, without ``pickle``: no name is imported, and nothing is run.

It knows the opcodes by which protocols 2 to 5 write lists, tuples, numbers, byte strings and numpy's
arrays. Any other opcode is an error, and so is any global but those of :mod:`.pickle_globals`. Its memory is
bounded except for the items of lists: byte strings are located and not read, and its stack and memo hold no
more than a pickler needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .pickle_globals import build, call, global_name
from .value import (
    ByteRange,
    Element,
    NewList,
    Plain,
    Text,
    Value,
    unchanged,
)

FIRST_BYTES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))

_INST, _STOP = b"i."
_LONGEST_INTEGER = 16
_LONGEST_NAME = 128
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


class _Machine:
    def __init__(self, value: Value, new_list: NewList, element: Element, dicts: bool) -> None:
        self._value, self._at = value, 0
        self._opcodes = _OPCODES | _OF_DICTS if dicts else _OPCODES
        self._new_list, self._element = new_list, element
        self._list_type = type(new_list())
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._puts = 0

    def run(self, most: int) -> Plain:
        for _ in range(most):
            code = self._value.byte(self._at)
            self._at += 1
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
        if self._marks or len(self._stack) != 1 or self._at != self._value.length:
            raise ValueError("its pickle is damaged: it ends before it is complete")
        result: Plain = self._stack[0]
        return result

    def _refused(self, code: int) -> ValueError:
        if code == _INST:
            global_name(f"{self._line()}.{self._line()}")
        if code in _REFUSED:
            return ValueError(f"its pickle asks for {_REFUSED[code]}: only plain data are read")
        return ValueError(
            f"its pickle is damaged: 0x{code:02x} at byte {self._at - 1} is no opcode known here"
        )

    def _take(self, length: int) -> bytes:
        data = self._value.read(self._at, length)
        self._at += length
        return data

    def _count(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _skip(self, length: int) -> int:
        """Skip the next ``length`` bytes, and return their start."""
        start = self._at
        if length > self._value.length - start:
            raise ValueError("it is cut off")
        self._at += length
        return start

    def _line(self) -> str:
        line = self._value.read(self._at, min(_LONGEST_NAME, self._value.length - self._at))
        end = line.find(b"\n")
        if end < 0:
            raise ValueError("its pickle is damaged: a name does not end")
        self._at += end + 1
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

    def _pass_over(self, size: int) -> None:
        self._skip(size)

    def _push(self, item: Any) -> None:
        self._stack.append(item)

    def _number(self, layout: str) -> None:
        self._push(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _long(self, size: int) -> None:
        length = self._count(size)
        if length > _LONGEST_INTEGER:
            raise ValueError(f"it holds an integer of {length} bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def _bytes(self, size: int) -> None:
        length = self._count(size)
        self._push(ByteRange(self._skip(length), length))

    def _text(self, size: int) -> None:
        length = self._count(size)
        self._push(Text(self._skip(length), length))

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


_OPCODES: dict[int, tuple[Callable[[_Machine, Any], None], Any]] = {
    0x80: (_Machine._pass_over, 1),  # PROTO
    0x95: (_Machine._pass_over, 8),  # FRAME
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

_OF_DICTS: dict[int, tuple[Callable[[_Machine, Any], None], Any]] = {
    ord("}"): (_Machine._empty_dict, None),
    ord("s"): (_Machine._set, None),
    ord("u"): (_Machine._set_to_mark, None),
    ord("d"): (_Machine._dict_to_mark, None),
}
