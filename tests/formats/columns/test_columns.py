"""Every value of a column comes back as it was; any other is refused by name."""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from shardprep.formats import UsageError
from shardprep.formats.records.codecs import DTYPES, ArrayCodec, BadValue
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


@given(st.sampled_from(sorted(VALUES)), st.data())
def test_a_value_comes_back_as_it_was(kind: str, data: st.DataObject) -> None:
    value, codec = data.draw(VALUES[kind]), field(kind).codec

    encoded = codec.encode(value)
    found = codec.decode(encoded)

    assert (type(found), found) == (type(value), value)
    assert codec.size in (None, len(encoded))


@given(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0), st.data())
def test_an_array_comes_back_with_its_dtype_shape_and_bytes(
    dtype: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = data.draw(hnp.arrays(np.dtype(dtype).newbyteorder("<"), shape))
    sizes = ["*" if data.draw(st.booleans()) else str(size) for size in shape]
    codec = field(f"{dtype}[{','.join(sizes)}]").codec

    found = codec.decode(codec.encode(array))

    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert isinstance(codec, ArrayCodec)
    assert ArrayCodec.of(codec.kind) == codec


@given(st.sets(st.sampled_from(range(3))), st.booleans())
def test_several_labels_come_back_in_order(labels: set[int], by_name: bool) -> None:
    codec = field("labels").codec

    given_as = [CLASSES[label] for label in labels] if by_name else list(labels)

    np.testing.assert_array_equal(codec.decode(codec.encode(given_as)), sorted(labels))


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


def test_a_schema_is_found_by_name_and_equal_to_its_json() -> None:
    schema = Schema(
        [Field("mask", "image"), Field("tags", "labels", CLASSES), Field("boxes", "float32[*,4]")]
    )

    assert Schema(Field.from_json(each.to_json()) for each in schema) == schema
    assert schema["tags"].classes == CLASSES
    with pytest.raises(UsageError, match="mask, tags, boxes"):
        schema["caption"]
