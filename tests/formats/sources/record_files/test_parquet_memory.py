"""Small Parquet files that hold gigabytes: repeated values are converted, and what cannot be is refused."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import open_dataset
from shardprep.formats.sources.recognise import recognise
from support.record_sources import records

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.slow

ROOM = 128 << 20  # bytes that a conversion may take beside its program
LIMITED = """
import resource, sys
import pyarrow.parquet, pyarrow.compute
from shardprep.cli.app import run
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(sys.argv[1]),) * 2)
sys.exit(run(sys.argv[2:]))
"""


def limited(*words: object, room: int = ROOM) -> subprocess.CompletedProcess[str]:
    """Run ``prep`` in a process that may take no more memory than that."""
    command = [sys.executable, "-c", LIMITED, str(room), *map(str, words), "--workers", "0", "--quiet"]
    few = {
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_ARENA_MAX": "1",
    }  # others reserve address space unused
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | few)


def repeated(value: Any, rows: int) -> Any:
    """A column of one value, stored once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


def lists(values: Any, lengths: list[int]) -> Any:
    offsets = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def write(path: Path, column: Any, **options: Any) -> Path:
    pq.write_table(pa.table({"caption": column}), path, compression="zstd", store_schema=False, **options)
    return path


CAPTION = "long " * 50_000
ROWS = 1000  # a quarter of a gigabyte of captions


@pytest.mark.torture
def test_repeated_captions_are_converted_to_shards_of_the_wanted_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", repeated(CAPTION, ROWS))

    done = limited("convert", path, tmp_path / "out", "--shard-size", "16MiB")

    assert f"{ROWS:,} records without images or labels, 0 classes, 0 B in 15 LMDB shards" in done.stdout
    with open_dataset(tmp_path / "out/train") as dataset:
        assert {dataset[number]["caption"] for number in (0, ROWS // 2, ROWS - 1)} == {CAPTION}


def as_varint(number: int, length: int = 0) -> bytes:
    """A number as Thrift's compact protocol has it, in at least that many bytes."""
    number, pieces = number << 1, []
    while number > 0x7F or len(pieces) + 1 < length:
        pieces.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*pieces, number])


def metadata_says(path: Path, number: int, instead: int) -> None:
    """Change a number in the metadata, and leave the pages as they are."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    old = as_varint(number)
    assert old in data[start:]
    path.write_bytes(data[:start] + data[start:].replace(old, as_varint(instead, len(old))))


MANY = 1 << 27


def a_list_of_many_nulls(path: Path) -> None:
    write(path, lists(pa.nulls(MANY, pa.int8()), [MANY]))
    metadata_says(path, MANY, 1)


def a_list_of_nulls_each_of_a_fixed_size(path: Path) -> None:
    column = pa.StructArray.from_arrays([pa.nulls(2, pa.list_(pa.int8(), 1 << 26))], ["boxes"])
    pq.write_table(pa.table({"caption": column}), path, compression="zstd")


def rows_of_nothing(path: Path) -> None:
    write(path, pa.nulls(3_000_000, pa.int64()))


def one_row_of_many_captions(path: Path) -> None:
    write(path, lists(repeated(CAPTION, 5000), [5000]))


def a_list_in_the_metadata_without_end(path: Path) -> None:
    metadata = b"\x15\x02\x19\xfc" + as_varint(30_000_000) + b"\0"
    path.write_bytes(b"PAR1" + metadata + len(metadata).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            a_list_of_many_nulls,
            "the row group 0 takes more than 1,073,741,824 bytes in memory; write smaller",
        ),
        (a_list_of_nulls_each_of_a_fixed_size, "the row group 0 takes more than"),
        (rows_of_nothing, r"claims 3,000,000 rows in [\d,]+ bytes"),
        (one_row_of_many_captions, r"has 12500\d+ bytes, but no record may have more"),
        (a_list_in_the_metadata_without_end, "Exceeded size limit"),
    ],
)
def test_a_small_file_that_claims_gigabytes_is_refused(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make(path := tmp_path / "a.parquet")

    done = limited("convert", path, tmp_path / "out", "--dry-run")

    assert path.stat().st_size < 20_000
    assert done.returncode == 1, done.stderr
    assert re.search(rf"a\.parquet.*{message}", done.stdout)


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (
            lambda texts: pa.array(texts),
            {"use_dictionary": False, "column_encoding": {"caption": "DELTA_BYTE_ARRAY"}},
        ),
        pytest.param(
            lambda texts: pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts)),
            {},
            marks=pytest.mark.skipif(not hasattr(pa, "json_"), reason="pyarrow 19 has the type"),
        ),
    ],
    ids=["shared prefixes", "JSON"],
)
def test_values_that_pyarrow_makes_no_dictionaries_of_are_read_in_batches(
    column: Callable[[list[str]], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    texts = [json.dumps("long " * 40_000 + str(number)) for number in range(400)]
    pq.write_table(pa.table({"caption": column(texts)}), tmp_path / "a.parquet", **options)

    found = records(recognise(tmp_path / "a.parquet").listing("train"))

    assert [record["caption"] for record in found.values()] == texts
