"""Every value of a column comes back as it was; any other is refused by name."""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats import UsageError
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.schema import Field, Schema
from support.image_files import JPEG

CLASSES = ("cat", "dog", "eel")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
VALUES = {
    "bytes": st.binary(),
    "image": st.just(JPEG),
    "text": st.text(),
    "json": JSON,
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "label": st.integers(-1, 2),
}


def field(kind: str) -> Field:
    return Field("x", kind, CLASSES if kind in ("label", "labels") else ())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bytes", "text"), ("image", b"no image"), ("text", b"bytes"), ("text", "\ud800"),
        ("json", (1, 2)), ("json", [{"a": (1,)}]), ("json", {1: 2}), ("json", math.nan), ("json", object()),
        ("int", 2**63), ("int", True), ("int", 1.0), ("float", "1"), pytest.param("float", 10**400, id="float-large"), ("float", True),
        ("label", 3), ("label", "owl"), ("label", -2), ("labels", [0, 0]), ("labels", ["owl"]),
        ("labels", "cat"), ("labels", 1), ("labels", [-1]),
        ("float32[2]", [1.0, 2.0]), ("float32[2]", np.zeros(3, "f4")), ("float32[2]", np.zeros(2)),
        ("float32[*]", np.zeros((1, 1), "f4")), ("float32[*]", np.zeros(1, ">f4")),
    ],
)  # fmt: skip
def test_what_a_column_cannot_hold_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(BadValue):
        field(kind).codec.encode(value)


@given(
    st.sampled_from([*VALUES, "labels", "float32[*,4]", "int16[3]", "bool[*,*]"]),
    st.binary(max_size=40),
)
def test_any_bytes_are_a_value_or_refused(kind: str, data: bytes) -> None:
    codec = field(kind).codec
    with suppress(BadValue):
        codec.decode(data)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "str",
        "object[]",
        "float32",
        "float32[",
        "float32[-1]",
        "float32[1,]",
        "int32[²]",
        "uint8[999999999]",
    ],
)
def test_unknown_kinds_are_refused_and_the_known_ones_named(kind: str) -> None:
    with pytest.raises(UsageError, match="image, bytes, text"):
        Field("x", kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"": "int"}, {"a/b": "int"}, {".a": "int"}, {"a" * 41: "int"}, {"key": "text"}, {"Image": "image"},
        {"a": "int", "A": "int"}, {"x": "label"}, {f"c{n}": "int" for n in range(257)},
    ],
)  # fmt: skip
def test_names_that_no_column_can_have_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Schema(fields)
