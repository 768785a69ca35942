from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing import EntryTable, GrowingTable


def test_many_rows_come_back_in_their_order() -> None:
    table = GrowingTable(np.dtype([("key", "S1"), ("x", "<f8")]))
    rows = [(b"%x" % i, float(i)) for i in range(40_000)]
    for row in rows:
        table.append(row)
    assert table.finish().tolist() == rows


def test_a_key_too_long_for_a_record_is_refused() -> None:
    with pytest.raises(SourceDamaged, match="shorten"):
        EntryTable(Path("src")).append("a" * 1025, 0, length=1)
