"""LMDBs of tensorpack with any plain data: the datapoints come out as they were put in, as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tensorpack_lmdb import NEWEST, SERIALIZERS, protocol_4, save_datapoints, value_of

from shardprep.formats import PlanOptions, SourceDamaged, convert, verify
from shardprep.formats.sources.tensorpack import read_item
from shardprep.loaders import Flow
from support.image_files import JPEG
from support.saved_items import are_same

IN_ORDER = PlanOptions(order="key")
FILES: dict[str, list[Any]] = {
    "arrays": [[np.full((n, 4), n, np.float32), np.arange(6).reshape(2, 3), n / 7] for n in range(5)],
    "several images": [[JPEG, JPEG + bytes(n), "text", n] for n in range(5)],
    "decoded image": [[np.full((4, 4, 3), n, np.uint8), n] for n in range(5)],
    "dicts": [{"image": JPEG, "label": n, "boxes": np.zeros((n, 4)), "name": f"n{n}"} for n in range(5)],
    "numpy's numbers": [[np.int16(n), np.float64(n)] for n in range(5)],
}


@pytest.mark.parametrize("serializer", ["pickle 2", "pickle 4", "pickle 5", "msgpack"])
@pytest.mark.parametrize("name", FILES)
def test_datapoints_come_out_as_they_were_put_in(serializer: str, name: str, tmp_path: Path) -> None:
    if serializer == "pickle 2" and name == "several images":
        pytest.skip("protocol 2 stores bytes as text")
    source = save_datapoints(tmp_path / "data.lmdb", FILES[name], SERIALIZERS[serializer])

    convert(source, tmp_path / "out", split="train", plan_options=IN_ORDER, workers=0)

    found = list(Flow.from_dataset(tmp_path / "out"))
    assert all(are_same(one, other) for one, other in zip(found, FILES[name], strict=True))
    assert verify(tmp_path / "out").findings == []


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[1.5, 2], [1.5]], "is a list of 1, expected a list of 2"),
        ([[1.5, 2], {"a": 1}], "is a dict of a, expected a list of 2"),
        ([{"key": "a", "v": 1.5}], "a component named key"),
        ([[[1.5], np.zeros(2, "c16")], [[1.5], np.zeros(2, "i4")]], "make no columns"),
        ([{"label": -7, "v": 1.5}], "its label is -7"),
        ([3], "not a list or dict of components"),
    ],
)
def test_what_is_not_like_the_first_or_no_column_is_refused(
    points: list[Any], message: str, tmp_path: Path
) -> None:
    source = save_datapoints(tmp_path / "data.lmdb", points)
    with pytest.raises(SourceDamaged, match=message):
        convert(source, tmp_path / "out", split="train", workers=0)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"]\x94h\x00a.",  # a list within itself
        b"}\x94(U\x01ah\x00u.",  # a dict within itself
        b"]\x94" + b"".join(b"](" + b"h%c" % n * 9 + b"e\x94" for n in range(7)) + b".",  # lists of lists
        b"(B\x00\x00\x01\x00" + bytes(1 << 16) + b"\x94" + b"h\x00" * 900 + b"l.",
    ],
)
def test_a_small_file_takes_little_memory_and_ends(opcodes: bytes) -> None:
    value = value_of(protocol_4(opcodes))
    with pytest.raises(ValueError, match="it"):
        read_item(value)


def test_bytes_that_are_there_many_times_are_bounded() -> None:
    data = NEWEST([block := bytes(1 << 16), *[block] * 900])
    value = value_of(data)
    with pytest.raises(ValueError, match="more bytes than the whole record"):
        read_item(value)
