"""Images with a table beside them: metadata.csv and metadata.jsonl."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import (
    SourceOptions,
    convert,
    open_dataset,
    plan_conversion,
    repair,
)
from shardprep.formats.errors import DataError, UsageError
from shardprep.formats.sources.recognise import recognise
from support.column_sources import as_csv, as_json_lines, write_pictures
from support.source_builders import write

NAMES = [f"{number}.png" for number in range(7)]


def folder_with(path: Path, rows: list[dict[str, Any]], name: str = "metadata.csv") -> Path:
    """A folder with the images of the rows and their table."""
    write_pictures(path, [row["file_name"] for row in rows])
    write(path / name, (as_csv if name.endswith("csv") else as_json_lines)(rows).encode())
    return path


def values(dataset: Path) -> dict[str, dict[str, Any]]:
    """The columns of each record by its key, and its label."""
    with open_dataset(dataset) as opened:
        names = [each.name for each in opened.manifest.labels.classes]
        return {
            record.key: {**record.columns, "class": names[record.label] if record.label >= 0 else None}
            for record in opened
        }


def test_columns_are_chosen_named_and_typed(tmp_path: Path) -> None:
    rows = [
        {"file_name": name, "How old": str(number), "tags": "new|big" if number % 2 else "", "box": "[1, 2]"}
        | {"sex": ("f", "")[number % 2], "about": '{"a": [1, null]}'}
        for number, name in enumerate(NAMES)
    ]
    columns = ("age:float=How old", "tags:labels", "box:uint8[2]", "sex:label", "about:json")

    (done,) = convert(
        folder_with(tmp_path / "s", rows),
        tmp_path / "out",
        workers=0,
        source_options=SourceOptions(columns=columns),
    )

    schema = done.manifest.schema
    assert [schema[name].classes for name in ("tags", "sex")] == [("big", "new"), ("f",)]
    assert done.manifest.source["columns"] == [*columns]
    for number, name in enumerate(NAMES):
        found = values(done.path)[name]
        assert found["age"] == float(number)
        assert found["sex"] == (-1 if number % 2 else 0)
        assert found["about"] == {"a": [1, None]}
        np.testing.assert_array_equal(found["tags"], [0, 1] if number % 2 else [])
        np.testing.assert_array_equal(found["box"], np.array([1, 2], np.uint8))


def test_kinds_are_guessed_from_all_rows(tmp_path: Path) -> None:
    cells = {
        "a": ["1", "", "2"],
        "b": ["1", "2.5", "nan"],
        "c": ["1", "2", "x"],
        "d": ["", "", ""],
        "e": ["-1", "2", "3"],
    }
    rows = [{"file_name": f"{n}.png"} | {name: cell[n] for name, cell in cells.items()} for n in range(3)]
    source = folder_with(tmp_path / "csv", rows)
    typed = [[1, 2.5, 3], [{}, [], None], ["x", 1, 2], [1 << 70, 1, 2], [True, False, True]]
    lines = [{"file_name": f"{n}.png"} | {str(i): cell[n] for i, cell in enumerate(typed)} for n in range(3)]
    other = folder_with(tmp_path / "json", lines, "metadata.jsonl")

    planned = [plan_conversion(path, tmp_path / "out", workers=0) for path in (source, other)]

    assert [[*one.problems] for one in planned] == [[], []]
    assert planned[0].splits[0].columns == {"a": "float", "b": "float", "c": "text", "d": "text", "e": "int"}
    assert planned[1].splits[0].columns == {"0": "float", "1": "json", "2": "json", "3": "json", "4": "json"}
    assert not (tmp_path / "out").exists()


def test_folders_are_no_classes_where_another_split_has_a_column_of_labels(tmp_path: Path) -> None:
    labelled = [{"file_name": name, "label": label} for name, label in zip(NAMES, "abcabca", strict=True)]
    folder_with(tmp_path / "source" / "train", labelled)
    folder_with(tmp_path / "source" / "val", [{"file_name": f"c{n}/{n}.png"} for n in range(5)])

    train, val = convert(tmp_path / "source", tmp_path / "out", workers=0)

    assert {each["class"] for each in values(train.path).values()} == {"a", "b", "c"}
    assert {each["class"] for each in values(val.path).values()} == {None}


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_column_of_splits_splits_the_images(name: str, tmp_path: Path) -> None:
    rows = [
        {"file_name": image, "Split": ("train", "Valid", "train")[number % 3], "age": number, "note": "x"}
        for number, image in enumerate(NAMES)
    ]
    source = folder_with(tmp_path / "s", rows, name)
    options = SourceOptions(columns=("age:int",))

    train, val = convert(source, tmp_path / "out", workers=0, source_options=options)
    (alone,) = convert(source, tmp_path / "alone", split="val", workers=0, source_options=options)
    (val.path / "shard-00000.lmdb").unlink()

    assert {key: row["age"] for key, row in values(train.path).items()} == {
        NAMES[n]: n for n in (0, 2, 3, 5, 6)
    }
    assert train.notes == ("columns left out: note; take one with --column NAME:KIND",)
    assert alone.manifest.root == val.manifest.root
    assert repair(val.path, source, workers=0).exit_code == 0
    assert {key: row["age"] for key, row in values(val.path).items()} == {NAMES[1]: 1, NAMES[4]: 4}


@pytest.mark.parametrize(
    ("name", "table", "match"),
    [
        ("metadata.csv", "file_name,split\n0.png\n", r"line 2: has 1 column"),
        ("metadata.csv", 'file_name,split\n0.png,"val\n', r"line 3: the row that begins in line 2 is not CSV"),
        ("metadata.csv", "file_name,age\n0.png,1\n1.png\n", r"line 3: has 1 column, but the first line has 2"),
        ("metadata.csv", "file_name,age\n0.png,1\n1.png,2\n2.png,3\n", r"line 4: 2\.png is missing"),
        ("metadata.csv", "file_name,age\n0.png,1\n", r"1\.png: has no row in the table"),
        ("metadata.csv", "file_name,age\n0.png,1\n0.png,2\n1.png,3\n", r"lines 2 and 3 have the same record key"),
        ("metadata.csv", "file_name,age\n0.png,\0\n1.png,3\n", r"line 2: has a NUL byte"),
        ("metadata.csv", 'file_name,age\n0.png,"1\n1.png,3\n', r"line 4: the row that begins in line 2 is not CSV"),
        ("metadata.csv", 'file_name,age\n0.png,"1"x\n1.png,3\n', r"line 2: the row that begins in line 2 is not CSV"),
        ("metadata.csv", "file_name,age\n../0.png,1\n1.png,3\n", r"line 2: .*without \.\."),
        ("metadata.csv", "file_name,age\n/etc/passwd,1\n1.png,3\n", r"line 2: names a file that is not beside the table"),
        ("metadata.csv", "file_name,age,age\n0.png,1,1\n", r"line 1: has a name twice"),
        ("metadata.csv", "path,age\n0.png,1\n", r"line 1: has no column 'file_name'.*--path-column"),
        ("metadata.csv", "", r"line 1: is empty"),
        ("metadata.csv", "file_name,x\n0.png,\xff\n".encode("latin-1"), r"line 2: is not UTF-8"),
        ("metadata.jsonl", '{"file_name": "0.png"}\n{"file_name": "1.png", "a": 1}\n', r"line 2: .*has 'a', unlike"),
        ("metadata.jsonl", '{"file_name": "0.png", "a": 1}\n{"file_name": "1.png"}\n', r"line 2: .*has no 'a'"),
        ("metadata.jsonl", '{"file_name": "0.png", "a": NaN}\n', r"line 1: NaN is not JSON"),
        ("metadata.jsonl", '{"file_name": "0.png", "a": 1}\n{"file_name": 3, "a": 1}', r"line 2: names a file that is not"),
        ("metadata.jsonl", '{"file_name": "0.png"}\n[1]\n', r"line 2: .*is not a JSON object"),
        ("metadata.jsonl", '{"file_name": "0.png"}\n' + "[" * 100_000, r"line 2: .*is not a row"),
        ("metadata.jsonl", '{"file_name": "0.png", "a": "' + "x" * (17 << 20) + '"}', r"line 1: has more than"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_an_error_with_its_line(
    name: str, table: str | bytes, match: str, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "s", ["0.png", "1.png"])
    write(tmp_path / "s" / name, table if isinstance(table, bytes) else table.encode())

    with pytest.raises(DataError, match=match) as found:
        convert(tmp_path / "s", tmp_path / "out", workers=0)

    assert found.value.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_the_row_of_a_missing_file_decides_neither_classes_nor_kinds(tmp_path: Path) -> None:
    write_pictures(tmp_path, ["a/0.png", "b/1.png"])
    write(tmp_path / "metadata.csv", b"file_name,age\na/0.png,1\nb/1.png,2\nloose.png,old\n")

    listing = recognise(tmp_path).survey("train")

    assert [each.name for each in listing.labels.classes] == ["a", "b"]
    assert listing.schema["age"].kind == "int"
    assert listing.problems


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"columns": ("age",)}, "expected NAME:KIND"),
        ({"columns": ("age:number",)}, "unknown kind 'number'"),
        ({"columns": ("old:int=Old",)}, "no column 'Old'; its columns are: file_name, age"),
        ({"columns": ("mask:image=age",)}, "--pair"),
        ({"columns": ("a:int=age", "b:int=age")}, "chosen twice"),
        ({"columns": "age:int"}, "must be a list"),
        ({"root": "."}, "--root: not for metadata"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = folder_with(tmp_path / "s", [{"file_name": "0.png", "age": 1}])

    with pytest.raises(UsageError, match=match):
        convert(source, tmp_path / "out", workers=0, source_options=SourceOptions(**options))


def test_a_number_of_json_that_no_float_holds_is_an_error_or_stays_exact(tmp_path: Path) -> None:
    rows = [{"file_name": "0.png", "a": 9007199254740993}, {"file_name": "1.png", "a": 0.5}]
    (done,) = convert(folder_with(tmp_path / "s", rows, "metadata.jsonl"), tmp_path / "out", workers=0)
    write(tmp_path / "s/metadata.jsonl", b'{"file_name": "0.png", "a": 1e400}\n')

    assert values(done.path)["0.png"]["a"] == 9007199254740993
    with pytest.raises(DataError, match="1e400 is too large for a float"):
        recognise(tmp_path / "s").listing("train")
