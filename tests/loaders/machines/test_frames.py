"""The frame of arrays: what is packed is unpacked, and everything else is refused."""

import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.stack import JsonValues
from shardprep.loaders.machines import codec
from shardprep.loaders.machines.codec import FrameDamaged, pack_batch, read_head, unpack_batch
from support.frame_changes import Parts, damage_the_parts, flip_a_bit, wired
from support.memory import memory_below
from support.saved_items import JSON

arrays = st.sampled_from(sorted(codec.DTYPES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
leaves = (
    arrays
    | st.lists(st.binary(max_size=20), max_size=5)
    | st.lists(st.text(max_size=20), max_size=5)
    | st.lists(arrays, max_size=4)
    | st.lists(JSON, max_size=4).map(JsonValues)
)
batches = st.recursive(
    leaves,
    lambda parts: (
        st.lists(parts, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=5), parts, max_size=4)
    ),
    max_leaves=8,
)


def unpacked(parts: Any, **limits: int) -> Any:
    return unpack_batch(read_head(parts[0]), parts[1:], **limits)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, JsonValues):
        assert repr(one) == repr(other)  # 1 and True, 0.0 and -0.0 differ
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_equal(one[name], other[name])
    else:
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert x == y if isinstance(x, bytes | str) else assert_equal(x, y) is None


def crafted(description: object, *parts: bytes, head: Any = (b"SPBF", 1, 0, 0)) -> list[bytes]:
    """Return a frame with a valid checksum; ``head`` is magic, version, kind and zero."""
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    fixed = codec.HEAD.pack(*head, 0, len(parts), len(text))
    return [fixed + struct.pack("<I", google_crc32c.value(fixed + text)) + text, *parts]


def described(raw: bytes, **changes: object) -> dict[str, object]:
    form = {"dtype": "<i4", "shape": [len(raw) // 4], "bytes": len(raw), "crc32c": google_crc32c.value(raw)}
    return {name: value for name, value in (form | changes).items() if value is not None}


@pytest.mark.slow
@given(batches)
@settings(deadline=None)
def test_what_is_packed_comes_back_bit_for_bit(batch: Any) -> None:
    assert_equal(unpacked(wired(pack_batch(batch))), batch)


def nest(depth: int) -> Any:
    return (nest(depth - 1),) if depth else np.zeros(1)


@pytest.mark.parametrize(
    "batch",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, np.longdouble),
        np.ma.array([1.0, 2.0], mask=[False, True]),
        [np.ma.array([1.0, 2.0], mask=[False, True])],
        "text",
        None,
        {1: np.zeros(2)},
        nest(codec.MAX_DEPTH + 1),
        tuple(np.zeros(1) for _ in range(codec.MAX_PARTS + 1)),
        {"x" * codec.MAX_DESCRIPTION: np.zeros(1)},
        [b""] * (codec.MAX_ITEMS + 1),
    ],
    ids=lambda batch: re.sub(" at 0x.*", "", str(batch))[:30],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(batch: Any) -> None:
    with pytest.raises(UsageError):
        pack_batch(batch)


SAMPLE = {
    "image": np.arange(24, dtype="f4").reshape(2, 3, 4),
    "key": [b"one", b"two"],
    "pair": (np.ones(2), 3),
}


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.sampled_from([flip_a_bit, damage_the_parts]))
@settings(max_examples=500, deadline=None)
def test_a_frame_that_was_changed_anywhere_is_refused(chance: Random, change: Callable[..., Parts]) -> None:
    parts = wired(pack_batch(SAMPLE, 5))
    changed = change(parts, chance)
    assume(changed != parts)

    with pytest.raises(FrameDamaged):
        unpacked(changed or [b""])


RAW = bytes(range(16))


def packed(items: bytes, **form: object) -> list[bytes]:
    """A list of these bytes; of one item, unless its form says otherwise."""
    return crafted(described(items, dtype=None, shape=None, **({"count": 1} | form)), items)


def listed(of: str, item: bytes) -> list[bytes]:
    """A list of one item."""
    return packed(struct.pack("<Q", len(item)) + item, of=of)


def listed_arrays(shapes: list[list[int]], *, axes: int, size: int = 8, **form: int) -> list[bytes]:
    """A list of float32 of these shapes, with ``size`` bytes of elements."""
    raw = b"".join(struct.pack(f"<{len(shape)}Q", *shape) for shape in shapes) + bytes(size)
    return packed(raw, of="<f4", axes=axes, **form)


NUMBERS = bytes(codec.PIECE)
MANY = described(NUMBERS, dtype=None, shape=None, of="<f4", axes=0, count=codec.PIECE // 4)

# another magic, another version, no batch, an unknown kind, and something in place of zero
HEADS = [(b"SPBG", 1, 0, 0), (b"SPBF", 2, 0, 0), (b"SPBF", 1, 1, 0), (b"SPBF", 1, 9, 0), (b"SPBF", 1, 0, 1)]
HOSTILE: dict[str, list[bytes]] = {
    "huge sides": crafted(described(RAW, shape=[2**40, 2**40]), RAW),
    "sides that wrap around": crafted(described(RAW, shape=[2**32, 2**32, 4]), RAW),
    "a huge side beside an empty one": crafted(described(b"", shape=[0, 2**62, 2**62]), b""),
    "a negative side": crafted(described(RAW, shape=[-2, -2]), RAW),
    "objects": crafted(described(RAW, dtype="|O", shape=[2]), RAW),
    "no shape": crafted(described(RAW, shape=None), RAW),
    "a wrong checksum": crafted(described(RAW, crc32c=1), RAW),
    "a true checksum": crafted(described(RAW, crc32c=True), RAW),
    "one buffer for two": crafted({"tuple": [described(RAW), described(RAW)]}, RAW),
    "two buffers for one": crafted(described(RAW), RAW, RAW),
    "many items": packed(RAW, count=2**60),
    "many bytes": crafted(described(RAW, bytes=2**62), RAW),
    "items of other lengths": packed(struct.pack("<2Q", 3, 5), count=2),
    "items with lengths that wrap around": packed(struct.pack("<2Q", 2**64 - 1, 1), count=2),
    "text that is not UTF-8": listed("text", b"\xff"),
    "JSON that is none": listed("json", b"{"),
    "JSON that is no number": listed("json", b"NaN"),
    "JSON that recursion does not take": listed("json", b"[" * 100_000),
    "a list of something unknown": listed("pickle", b"x"),
    "arrays of another size": listed_arrays([[2**40, 2**40]], axes=2),
    "an empty array with huge sides": listed_arrays([[0, 2**62, 2**62]], axes=3, size=0),
    "an empty array with a side that numpy cannot address": listed_arrays([[0, 2**61]], axes=2, size=0),
    "many arrays without axes": listed_arrays([[]], axes=0, count=2**60),
    "many small arrays": crafted({"tuple": [MANY] * 5}, *[NUMBERS] * 5),
    **{f"arrays with {n} axes": listed_arrays([[2**62] * abs(n)], axes=n) for n in (-1, 131_071)},
    "depth": crafted(b'{"tuple":[' * 9 + b"1" + b"]}" * 9),
    "depth that recursion does not take": crafted(b'{"tuple":[' * 6000 + b"1" + b"]}" * 6000),
    "a long number": crafted(b'{"count":' + b"9" * 60_000 + b"}"),
    "no object": crafted(b"[]"),
    "not ASCII": crafted('{"tuple":[],"ä":1}'.encode()),
    "a long description": crafted(b" " * codec.MAX_DESCRIPTION + b"{}"),
    **{str(head): crafted({"tuple": []}, head=head) for head in HEADS},
    "nothing": [b""],
    "a web server": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_frame_is_refused_without_a_large_allocation(frame: list[bytes]) -> None:
    with memory_below(4 << 20), pytest.raises(FrameDamaged):
        unpacked(frame)
