"""Canonical JSON: one text for one value."""

import math
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of

scalars = (
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)
json_values = st.recursive(scalars, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=20)


@pytest.mark.slow
@given(json_values)
def test_what_is_written_is_read(value: Any) -> None:
    assert parse_canonical_json(canonical_json(value)) == value


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))

    assert canonical_json(backwards) == canonical_json(value)
    assert sha256_of(backwards) == sha256_of(value)


@pytest.mark.slow
@given(json_values)
def test_the_text_is_one_line_of_ascii(value: Any) -> None:
    text = canonical_json(value).decode("ascii")

    assert text.index("\n") == len(text) - 1


def test_the_text_never_changes() -> None:
    value = {"b": [1, -2.5, True, None], "a": "é\n", "": {}}

    assert canonical_json(value) == b'{"":{},"a":"\\u00e9\\n","b":[1,-2.5,true,null]}\n'
    assert sha256_of(value) == "sha256:fedcad82d76705603b4cdc3e949793ce6f5bd8c90ea88b8489ddb7ce0fb92f19"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_written(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json([number])


OTHER_TEXTS = {
    "no newline": b"1",
    "two newlines": b"1\n\n",
    "carriage return": b"1\r\n",
    "space": b'{"a": 1}\n',
    "space in front": b" 1\n",
    "unsorted keys": b'{"b":1,"a":2}\n',
    "duplicate keys": b'{"a":1,"a":1}\n',
    "needless escape": b'"\\u0061"\n',
    "escape in capitals": b'"\\u00E9"\n',
    "escaped slash": b'"\\/"\n',
    "no escape": '"é"\n'.encode(),
    "float with more digits": b"1.50\n",
    "exponent in capitals": b"1E+30\n",
    "minus zero": b"-0\n",
    "NaN": b"NaN\n",
    "infinity": b"1e400\n",
    "minus infinity": b"-Infinity\n",
    "5,000 digits": b"9" * 5000 + b"\n",
    "200,000 lists": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "byte order mark": b"\xef\xbb\xbf1\n",
    "UTF-16": '"a"\n'.encode("utf-16"),
    "UTF-32": '"a"\n'.encode("utf-32-be"),
    "invalid UTF-8": b'"\xff"\n',
    "two values": b"1 2\n",
    "nothing": b"",
    "newline": b"\n",
}


@pytest.mark.parametrize("text", OTHER_TEXTS.values(), ids=OTHER_TEXTS)
def test_every_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|canonical"):
        parse_canonical_json(text)


@given(json_values, st.integers(0), st.binary(min_size=1, max_size=3))
def test_a_changed_text_is_refused_or_means_another_value(value: Any, at: int, new: bytes) -> None:
    text = canonical_json(value)
    at %= len(text)
    changed = text[:at] + new + text[at + len(new) :]
    assume(changed != text)
    try:
        meant = parse_canonical_json(changed)
    except ValueError:
        return

    assert canonical_json(meant) == changed
