"""Parquet files: what the library datasets wrote comes out, a hostile or huge file is only an error."""

import datetime
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shardprep.formats import BadImage, PlanOptions, SourceDamaged, UsageError, convert, open_dataset
from shardprep.formats.records.schema import BadValue
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.sources import parquet
from shardprep.formats.sources.recognise import recognise
from support.datasets import converted
from support.image_files import JPEG, encoded, pixels
from support.record_sources import IMAGES, records

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PNG = encoded(pixels(5, 4, 3), ".png")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, columns: dict[str, Any], *, names: list[str] | None = None) -> Path:
    """Write a file as Hugging Face has it; columns are values, or values and their type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array(*(v if isinstance(v, tuple) else [v])) for name, v in columns.items()})
    if names is not None:
        label, grid = {"names": names, "_type": "ClassLabel"}, {"shape": [2, 1], "_type": "Array2D"}
        features = {"label": label, "grid": grid}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def images(*numbers: int) -> tuple[list[dict[str, Any]], Any]:
    return [{"bytes": IMAGES[n], "path": f"{n}.jpg"} for n in numbers], IMAGE


def test_other_columns_keep_their_values_behind_a_link_that_alone_has_the_suffix(tmp_path: Path) -> None:
    views = pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())])  # as Polars writes
    columns = {
        "image": (images(0)[0], views),
        "label": ([None], pa.int64()),
        "caption": (["ein Käfer"], pa.string_view()),
        "count": ([7], pa.uint8()),
        "score": ([0.5], pa.float32()),
        "raw": ([b"\0\xff"], pa.binary(2)),
        "ids": [[1, 2, 3]], "box": ([[0.5, 1.0]], pa.list_(pa.float32(), 2)),
        "tags": [["a", None]], "grid": [[[3], [4]]], "boxes": [[[0.5]]],
        "objects": [{"area": [1.5, math.nan], "name": "x"}],
        "seg": [{"path": None, "bytes": PNG}], "crowd": [True], "gap": ([[[1, None]]], pa.list_(pa.list_(pa.int8(), 2), 1)),
        "maybe": ([None], pa.int64()), "weight": ([None], pa.float32()),
        "pairs": ([[("a", 1)]], pa.map_(pa.string(), pa.int8())),
        "species": pa.array(["ant"]).dictionary_encode(),
        "when": [datetime.datetime(2024, 5, 6, 7, 8, 9)],
    }  # fmt: skip
    (link := tmp_path / "a.parquet").symlink_to(write(tmp_path / "blob", columns, names=["ant"]))
    listing = recognise(link).listing("train")
    assert {field.name: field.kind for field in listing.schema} == {
        "caption": "text", "count": "int", "score": "float", "raw": "bytes", "ids": "int64[*]",
        "box": "float32[2]", "tags": "json", "objects": "json", "seg": "image", "crowd": "bool[]",
        "maybe": "json", "weight": "float", "pairs": "json", "species": "text", "when": "text",
        "grid": "int64[2,1]", "boxes": "json", "gap": "json",
    }  # fmt: skip
    record = records(listing)["0.jpg"]
    arrays = [record.pop(name).tolist() for name in ("ids", "box", "crowd", "grid")]
    assert arrays == [[1, 2, 3], [0.5, 1.0], True, [[3], [4]]]
    assert math.isnan(record.pop("weight"))
    assert record == {
        "label": -1, "image": IMAGES[0], "caption": "ein Käfer", "count": 7, "score": 0.5, "raw": b"\0\xff",
        "tags": ["a", None], "objects": {"area": [1.5, None], "name": "x"}, "seg": PNG, "maybe": None,
        "boxes": [[0.5]], "gap": [[1, None]], "pairs": [["a", 1]], "species": "ant", "when": "2024-05-06 07:08:09",
    }  # fmt: skip


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "no bytes": ({"image": ([{"bytes": JPEG, "path": "a"}, {"bytes": None, "path": "cat.jpg"}], IMAGE)},
                 r"row 1: has only the path of the image, 'cat\.jpg', not its bytes"),
    "a label of no class": ({"image": images(0, 1), "label": [0, 2]}, "row 1: has the label 2, but there are 2 classes"),
    "a negative label": ({"image": images(0, 1), "label": [-2, 0]}, "row 0: has the label -2"),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "message"), ODD.values(), ids=ODD)
def test_an_odd_row_is_named(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", columns, names=["ant", "bee"])
    with pytest.raises(SourceDamaged, match=rf"a\.parquet, {message}"):
        recognise(path).listing("train")


def test_a_null_image_is_a_bad_one_that_may_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"image": ([None, {"bytes": JPEG, "path": "a"}], IMAGE)})
    with pytest.raises(BadImage, match=r"row 0: .*empty.*--on-bad-image skip"):
        converted(path, tmp_path / "out")
    assert converted(path, tmp_path / "out", on_bad_image="skip").records == 1


def test_values_that_no_column_can_hold_are_named(tmp_path: Path) -> None:
    for name, odd in {
        "big": ([1, 1 << 63], pa.uint64()),
        "ids": [[1], [None]],
        "crowd": [[True], [True, None]],
        "box": ([[0.5], None], pa.list_(pa.float32())),
    }.items():
        path = write(tmp_path / "a.parquet", {"image": images(0, 1), name: odd})
        listing, message = recognise(path).listing("train"), rf"row 1: 1\.jpg: the column {name}"
        with listing.reader.open() as reader, pytest.raises(BadValue, match=message):
            reader.values(listing.entries[1])
    assert listing.entries["length"].tolist() >= [len(IMAGES[0]), len(IMAGES[1])]
    write(tmp_path / "a.parquet", {"image": images(0), "more": ([[JPEG]], pa.list_(pa.binary()))})
    with pytest.raises(UsageError, match=r"a\.parquet: the column more has bytes within list<"):
        recognise(tmp_path / "a.parquet").listing("train")


def test_all_files_that_are_damaged_or_have_other_columns_are_named(tmp_path: Path) -> None:
    for number, column in enumerate(("label", "label", "labels", "label")):
        file = tmp_path / f"hub/data/train-0000{number}-of-00004.parquet"
        write(file, {"image": images(number), column: [0]})
        if number in (1, 3):
            file.write_bytes(file.read_bytes()[:-1])
    damaged = r"00001-of-00004\.parquet: is not a Parquet file, or is truncated.*\(the first of 2\)"
    other = r"00002-of-00004\.parquet: has different columns from data/train-00000-of-00004"
    with pytest.raises(SourceDamaged, match=rf"{damaged}; also: .*{other}"):
        recognise(tmp_path / "hub").listing("train")


def test_a_file_that_is_no_parquet_or_claims_gigabytes_is_refused_by_name(tmp_path: Path) -> None:
    truncated = np.arange(99).tobytes() + b"\xff" * 8  # a length of gigabytes
    metadata = b"\x15\x02\x19\xfc\x80\x9c\xa7\x0e\0"  # a list of 30,000,000 items
    for data, reason in [
        *((each, "") for each in (b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1")),
        (truncated, ": is not a Parquet file, or is truncated"),
        (b"PARE" + bytes(100) + b"\x32\0\0\0PARE", ": is encrypted; write it without encryption$"),
        (b"PAR1" + metadata + len(metadata).to_bytes(4, "little") + b"PAR1", ": .*Exceeded size limit"),
    ]:
        (tmp_path / "a.parquet").write_bytes(data)
        with pytest.raises((SourceDamaged, UsageError), match=rf"a\.parquet{reason}"):
            recognise(tmp_path / "a.parquet").listing("train")
    write(tmp_path / "a-val.parquet", {"image": images(0)})
    (tmp_path / "a.parquet").rename(tmp_path / "a-train.parquet")
    assert len(recognise(tmp_path).listing("val").entries) == 1


CAPTION = "long " * 50_000
ROWS = 200  # 50 MB of captions, in a file of some kilobytes


def test_repeated_captions_are_converted_to_shards_of_the_wanted_size(tmp_path: Path) -> None:
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array([CAPTION]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"caption": repeated}), path, compression="zstd", store_schema=False)
    converted(path, tmp_path / "out", shard_size=4 << 20)
    with open_dataset(tmp_path / "out") as dataset:
        assert len(dataset.manifest.shards) == 13
        assert {dataset[number]["caption"] for number in (0, ROWS // 2, ROWS - 1)} == {CAPTION}


def test_shuffling_large_row_groups_is_said_and_the_order_of_the_source_reads_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_KEPT_BYTES", 0)
    for number, numbers in enumerate(in_files := [[5, 3, 9, 11, 1], [7, 0, 8, 2, 4, 6, 10]]):
        write(tmp_path / f"in/train-0000{number}-of-00002.parquet", {"image": images(*numbers)})
    progress = Mock(wraps=NoProgress())
    for order in ("source", "shuffled"):
        assert not progress.note.call_args_list[1:]
        plan_options = PlanOptions(order=order)
        convert(tmp_path / "in", tmp_path / order, plan_options=plan_options, workers=0, progress=progress)
    assert "train: shuffling" in progress.note.call_args[0][0]
    with open_dataset(tmp_path / "source/train") as dataset:
        assert [record.key for record in dataset] == [f"{n}.jpg" for numbers in in_files for n in numbers]
