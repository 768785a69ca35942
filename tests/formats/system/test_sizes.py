"""Sizes in bytes from text, such as "256MiB"."""

from __future__ import annotations

import pytest

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.sizes import byte_count, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("256MiB", 256 << 20),
        ("1GB", 10**9),
        ("1.5k", 1536),
        ("2 TiB", 2 << 40),
        (" 0.0015kb ", 1),
        ("9007199254740993B", (1 << 53) + 1),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e3", "1,5GB", "1 2", "2**20", "9" * 19])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("given", ["2GiB", "1.5 GB", "4096B"])
def test_a_size_where_a_number_may_stand_too_has_its_unit(given: str) -> None:
    assert byte_count(given, of="a window") == parse_bytes(given)


@pytest.mark.parametrize("given", ["4096", "2G", "2GiB ", "many B", "", 2048, None])
def test_a_size_where_a_number_may_stand_too_is_refused_without_a_unit(given: object) -> None:
    with pytest.raises(UsageError, match="a window is a whole number or a size"):
        byte_count(given, of="a window")
