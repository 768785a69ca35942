"""Images with a table beside them: metadata.csv and metadata.jsonl."""

import re
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import (
    PlanMismatch,
    PlanOptions,
    SourceOptions,
    convert,
    open_dataset,
    plan_conversion,
    repair,
)
from shardprep.formats.errors import DataError, ShardprepError, UsageError
from shardprep.formats.sources.recognise import recognise
from support.column_sources import as_csv, as_json_lines, picture, rows_of, write_pictures
from support.datasets import prep_here
from support.source_builders import write

NAMES = [f"{number}.png" for number in range(7)]
KINDS = {"age": "int", "score": "float", "caption": "text"}


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


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
@pytest.mark.parametrize("layout", ["flat", "root", "splits"])
def test_rows_become_columns_of_their_images(name: str, layout: str, tmp_path: Path) -> None:
    rows = rows_of(NAMES)
    source = tmp_path / "source"
    if layout == "root":
        folder_with(source, [{**row, "file_name": f"train/{row['file_name']}"} for row in rows], name)
    else:
        folder_with(source / ("train" if layout == "splits" else ""), rows, name)

    (done,) = convert(source, tmp_path / "out", workers=0, plan_options=PlanOptions(shard_size=400))

    found = values(done.path)
    assert {field.name: field.kind for field in done.manifest.schema} == KINDS
    assert len(done.manifest.shards) > 1
    for number, row in enumerate(rows):
        expected = {column: row[column] for column in KINDS} | {"class": None}
        assert found[NAMES[number]] == expected
    with open_dataset(done.path) as opened:
        assert {record.key: record.image for record in opened} == {n: picture(i) for i, n in enumerate(NAMES)}


def test_csv_and_json_lines_give_one_dataset(tmp_path: Path) -> None:
    roots = set()
    for name in ("metadata.csv", "metadata.jsonl"):
        source = folder_with(tmp_path / name / "s", rows_of(NAMES), name)
        roots.add(convert(source, tmp_path / name / "out", workers=0)[0].manifest.content_root)

    assert len(roots) == 1


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


@pytest.mark.parametrize(
    ("names", "labels", "classes"),
    [
        (["a/0.png", "b/1.png"], None, ["a", "b"]),
        (["a/0.png", "1.png"], None, [None, None]),
        (["images/0.png", "images/1.png"], None, [None, None]),
        (["a/0.png", "b/1.png"], ["x", ""], ["x", None]),
        (["a/0.png", "b/1.png"], ["3", "0"], ["00003", "00000"]),
    ],
)
def test_labels_come_from_a_column_or_from_class_folders(
    names: list[str], labels: list[str] | None, classes: list[str | None], tmp_path: Path
) -> None:
    rows = [
        {"file_name": n, "age": 1} | ({"label": labels[i]} if labels else {}) for i, n in enumerate(names)
    ]

    (done,) = convert(folder_with(tmp_path / "s", rows), tmp_path / "out", workers=0)

    assert [values(done.path)[name] for name in names] == [{"age": 1, "class": name} for name in classes]


def test_splits_have_one_schema_and_one_label_space(tmp_path: Path) -> None:
    for split, labels, ages in (("train", "ab", ["1", "2"]), ("val", "bc", ["1", "2.5"])):
        rows = [
            {"file_name": f"{label}.png", "label": label, "age": age}
            for label, age in zip(labels, ages, strict=True)
        ]
        folder_with(tmp_path / "s" / split, rows)

    train, val = convert(tmp_path / "s", tmp_path / "out", workers=0)

    assert train.manifest.schema == val.manifest.schema
    assert train.manifest.labels == val.manifest.labels
    assert values(val.path) == {"b.png": {"age": 1.0, "class": "b"}, "c.png": {"age": 2.5, "class": "c"}}


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


@pytest.mark.parametrize(("splits", "place"), [(["train", "fold 1"], ""), (["val", "val"], "train")])
def test_a_column_of_other_values_or_of_images_in_folders_of_splits_is_a_column(
    splits: list[str], place: str, tmp_path: Path
) -> None:
    rows = [{"file_name": f"{n}.png", "split": split} for n, split in enumerate(splits)]
    folder_with(tmp_path / "s" / place, rows)

    (done,) = convert(tmp_path / "s", tmp_path / "out", workers=0)

    assert done.manifest.split == "train"
    assert [row["split"] for _, row in sorted(values(done.path).items())] == splits


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


def test_a_value_that_its_column_cannot_hold_names_its_image(tmp_path: Path) -> None:
    source = folder_with(
        tmp_path / "s", [{"file_name": "0.png", "age": 1}, {"file_name": "1.png", "age": ""}]
    )
    options = SourceOptions(columns=("age:int",))

    planned = plan_conversion(source, tmp_path / "out", workers=0, source_options=options)
    with pytest.raises(DataError, match=r"1\.png: the column age: ") as found:
        convert(source, tmp_path / "out", workers=0, source_options=options)

    assert found.value.key == "1.png"
    assert next(str(problem) for problem in planned.problems).count("1.png: the column age")


def test_other_columns_are_another_plan_and_a_repair_takes_the_same(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "s", rows_of(NAMES))
    options = SourceOptions(columns=("years:float=age",))
    (done,) = convert(source, tmp_path / "out", workers=0, source_options=options)
    (done.path / "shard-00000.lmdb").unlink()

    repaired = repair(done.path, source, workers=0)
    assert repaired.exit_code == 0
    assert values(done.path)["3.png"] == {"years": 18.0, "class": None}
    with pytest.raises(PlanMismatch, match="columns"):
        convert(source, tmp_path / "out", workers=0)


def test_a_table_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "s", rows_of(NAMES))
    listing = recognise(source).listing("train")
    write(source / "metadata.csv", as_csv(rows_of(NAMES)[::-1]).encode())

    with pytest.raises(DataError, match="changed while it was read"), listing.reader:
        pass


def test_a_reader_holds_no_table(tmp_path: Path) -> None:
    import pickle

    sizes = []
    for count in (3, 300):
        names = [f"{number}.png" for number in range(count)]
        source = folder_with(tmp_path / str(count), [row | {"caption": "x" * 50} for row in rows_of(names)])
        sizes.append(len(pickle.dumps(recognise(source).listing("train").reader)))

    assert abs(sizes[1] - sizes[0]) < 10


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["metadata.csv", "metadata.jsonl"]),
    data=st.binary(max_size=80),
    begins=st.booleans(),
)
def test_any_bytes_are_a_table_or_a_documented_error(
    name: str, data: bytes, begins: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    head = b"file_name,a\n0.png," if name.endswith("csv") else b'{"file_name": "0.png", "a": '
    write(folder / name, head * begins + data)
    write_pictures(folder, ["0.png"])
    with suppress(ShardprepError):
        listing = recognise(folder).listing("train")
        with listing.reader as reader:
            for entry in listing.entries:
                reader.values(entry)


BIG = st.integers(-(1 << 66), 1 << 66).map(str) | st.integers((1 << 53) - 2, (1 << 53) + 2).map(str)
FRACTIONS = st.floats(allow_nan=False, allow_infinity=False)
CELLS = st.one_of(
    st.integers(-9, 99).map(str),
    BIG,
    FRACTIONS.map(repr),
    FRACTIONS.map("{:.18e}".format),
    st.from_regex(r"[+-]?[0-9]{0,22}[.]?[0-9]{0,22}([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["", " ", "nan", "-inf", "00501", "+4915112345678", "0x10", "1_000", "\u0663", "-0", "-"]
    ),
)


@settings(max_examples=15, deadline=None)
@given(columns=st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=4, max_size=9))
def test_a_guessed_kind_gives_back_every_number_as_it_is_written(
    columns: list[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("guessed")
    cells = {f"c{number}": column for number, column in enumerate(columns)}
    rows = [{"file_name": f"{n}.png"} | {name: column[n] for name, column in cells.items()} for n in range(3)]

    (done,) = convert(folder_with(folder / "s", rows), folder / "out", workers=0)

    found = values(done.path)
    for name, column in cells.items():
        kind = done.manifest.schema[name].kind
        for number, cell in enumerate(column):
            value, text = found[f"{number}.png"][name], cell.strip()
            if kind == "int":
                assert str(value) == text
            elif kind == "float" and text[-1:].isdigit():
                digits = re.sub("[-.]|[eE].*", "", text).lstrip("0")
                assert Decimal(f"{value:.{max(1, len(digits)) - 1}e}") == Decimal(text)
                assert not re.match(r"-?0[0-9]|\+", text)
            elif kind == "float":
                assert text in ("", "nan", "-inf") or text.endswith(".")
            else:
                assert value == cell
        if all(re.fullmatch("0|-?[1-9][0-9]{0,17}", cell) for cell in column):
            assert kind == "int"


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["12345678901234567890", "1"], "text"),
        (["00501", "10001"], "text"),
        (["9007199254740993", "0.5"], "text"),
        (["9007199254740993", ""], "text"),
        (["9007199254740993", "5"], "int"),
        (["0.50", "1"], "float"),
        (["1.0E10", "1e-05"], "float"),
        (["12e4", "34e5"], "text"),
    ],
)
def test_the_command_says_which_kinds_it_guessed(cells: list[str], kind: str, tmp_path: Path) -> None:
    rows = [{"file_name": f"{n}.png", "id": cell} for n, cell in enumerate(cells)]
    source = folder_with(tmp_path / "s", rows)
    write_pictures(tmp_path / "plain", [row["file_name"] for row in rows])
    write(tmp_path / "plain/metadata.csv", b"file_name\n0.png\n1.png\n")
    words = ("--workers", 0, "--quiet")

    planned = prep_here("convert", source, tmp_path / "out", "--dry-run", *words)
    done = prep_here("convert", source, tmp_path / "out", *words)
    prep_here("convert", tmp_path / "plain", tmp_path / "joined", *words)
    joined = prep_here("join", tmp_path / "joined/train", "--column", f"id={source / 'metadata.csv'}", *words)

    for said in (planned, done, joined):
        assert re.search(rf"columns +id \({kind}\)\n", said.stdout), said


def test_a_number_of_json_that_no_float_holds_is_an_error_or_stays_exact(tmp_path: Path) -> None:
    rows = [{"file_name": "0.png", "a": 9007199254740993}, {"file_name": "1.png", "a": 0.5}]
    (done,) = convert(folder_with(tmp_path / "s", rows, "metadata.jsonl"), tmp_path / "out", workers=0)
    write(tmp_path / "s/metadata.jsonl", b'{"file_name": "0.png", "a": 1e400}\n')

    assert values(done.path)["0.png"]["a"] == 9007199254740993
    with pytest.raises(DataError, match="1e400 is too large for a float"):
        recognise(tmp_path / "s").listing("train")


TEXT = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(cells=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_texts_of_csv_come_back(
    cells: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"a": a, "file_name": f"{n}.png", "b": b} for n, (a, b) in enumerate(cells)]
    folder_with(folder, rows)

    listing = recognise(folder, options=SourceOptions(columns=("a:text", "b:text"))).listing("train")

    with listing.reader as reader:
        found = {entry["key"].decode(): reader.values(entry) for entry in listing.entries}
    assert found == {f"{n}.png": (a.encode(), b.encode()) for n, (a, b) in enumerate(cells)}
