from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.listing import EntryTable, GrowingTable, repeated_keys
from shardprep.formats.sources.source import entry_dtype


def test_the_columns_are_as_wide_as_the_longest_text() -> None:
    table = EntryTable(Path("src"))
    table.append("a", 1, length=5, path=b"train/a.jpg", mtime_ns=9)
    table.append("longer", 2, length=6, offset=1 << 40)
    entries = table.finish()
    assert entries.dtype == entry_dtype(6, 11)
    assert entries.tolist() == [(b"a", b"train/a.jpg", 1, 5, 0, 9), (b"longer", b"", 2, 6, 1 << 40, 0)]


def test_an_empty_table_has_the_columns_of_a_listing() -> None:
    entries = EntryTable(Path("src")).finish()
    assert len(entries) == 0
    assert entries.dtype == entry_dtype(1, 1)


def test_many_rows_come_back_in_their_order() -> None:
    table = GrowingTable(np.dtype([("key", "S1"), ("x", "<f8")]))
    rows = [(b"%x" % i, float(i)) for i in range(40_000)]
    for row in rows:
        table.append(row)
    assert table.finish().tolist() == rows


def test_an_image_of_absurd_size_is_refused_before_it_is_read() -> None:
    with pytest.raises(SourceDamaged, match=r"src: a: has 67108865 bytes"):
        EntryTable(Path("src")).append("a", 0, length=MAX_IMAGE_BYTES + 1)


def test_a_key_too_long_for_a_record_is_refused() -> None:
    with pytest.raises(SourceDamaged, match="shorten"):
        EntryTable(Path("src")).append("a" * 1025, 0, length=1)


@given(st.lists(st.binary(min_size=1, max_size=2).filter(lambda key: key[-1:] != b"\0"), max_size=30))
def test_keys_that_occur_more_than_once_are_found(keys: list[bytes]) -> None:
    texts = [key.hex() for key in keys]
    array = np.array([text.encode() for text in texts], "S4")
    assert repeated_keys(array) == sorted({t.encode() for t in texts if texts.count(t) > 1})
