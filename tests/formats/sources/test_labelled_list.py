"""Tables of images: lists with their labels, in three forms, and metadata beside the images."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import SourceOptions, convert, join, open_dataset, plan_conversion, read_manifest
from shardprep.formats.errors import DataError, ShardprepError, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Listing
from shardprep.formats.sources.tables import MAX_LINE_BYTES
from support.column_sources import as_csv, as_json_lines, write_pictures
from support.datasets import prep_here
from support.source_builders import contents, image, write

ROWS = {"cat/1.jpg": "cat", "cat/a b.jpg": "cat", "dog.jpg": "dog", "été/2.jpg": "dog"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ROWS:
        write(tmp_path / "root" / name, image(name))
    return tmp_path / "root"


def listing(path: Path, text: str | bytes, root: Path, **options: Any) -> Listing:
    write(path, text if isinstance(text, bytes) else text.encode())
    return recognise(path, options=SourceOptions(root=root, **options)).listing("train")


HOSTILE: list[tuple[str, str | bytes, str]] = [
    ("list.txt", b"dog.jpg dog\ncat.jpg\n", r"line 2: 'cat\.jpg' is not a path and its label"),
    ("list.txt", b"dog.jpg\tdog\t0\t0\n", r"line 1: 'dog\.jpg\\tdog\\t0\\t0' is not a path and its label"),
    ("list.txt", b"dog.jpg dog\n\xff\xfe 1\n", r"line 2: is not UTF-8 text at its byte 0"),
    ("list.txt", b"a b\n" + b"x" * (MAX_LINE_BYTES + 1), r"line 2: has more than 16777216 bytes"),
    ("list.txt", b"dog\0.jpg dog\n", r"line 1: has a NUL byte"),
    ("list.txt", b"/etc/passwd dog\n", r"line 1: '/etc/passwd' is not below .*--root"),
    ("list.txt", b"dog.jpg dog\n../x.jpg dog\n", r"line 2: '\.\./x\.jpg' may lead out"),
    ("list.csv", b"a/../b,x\na/../c,x\na/../d,x\ndog.jpg,\n", r"line 1: 'a/\.\./b' .*\(the first of 3\); also: .*line 4: "),
    ("list.txt", b"x" * 1025 + b" dog", r"line 1: names no file with a path of at most 1024 bytes"),
    ("list.txt", b"dog.jpg 1\ncat/1.jpg cat", r"line 2: has the label 'cat', but the first"),
    ("list.txt", b"dog.jpg 02139\ncat/1.jpg 2139\n", r"line 2: has the label '2139', but elsewhere '02139'"),
    ("list.txt", b"dog.jpg 100000", r"line 1: has the label 100000, but .* 99999"),
    ("list.csv", b"path,label\ndog.jpg,2.0\n", r"line 2: has the label 2\.0, but .* integers from 0"),
    ("metadata.csv", "file_name,label\n0.png,0\n1.png,-2\n", r"line 3: has the label -2, but [^;]* 99999; correct the table$"),
    ("list.csv", b"path,label\ndog.jpg," + b"x" * 256, r"line 2: has a label of 256 char"),
    ("list.csv", b"path,label\ndog.jpg,\n", r"line 2: has no label"),
    ("list.csv", b"path,label\ndog.jpg," + b"x" * 200_000, r"line 2 is not CSV .* to JSON Lines"),
    ("list.csv", b"a,b\ndog.jpg,dog\n", r"has no column 'path' .*--path-column: a, b$"),
    ("list.csv", b",path,b\n0,dog.jpg,dog\n", r"has no column 'label' .*--label-column .*: , path, b$"),
    ("list.csv", b"path,b\ndog.jpg,dog\n", r"has no column 'label' .*--label-column .*: path, b$"),
    ("list.jsonl", b'{"path": "x", "label": ' + b"9" * 5000 + b"}", r"line 1: "),
    ("list.jsonl", b"{", r"line 1: "),
    ("list.jsonl", rb'{"path": "\ud800", "label": 1}', r"line 1: "),
    ("list.jsonl", b'{"path": "x", "label": true}', r"line 1: .* neither text nor"),
    ("list.txt", b"a.jpg a\ndog.jpg a\n\ndog.jpg a\n", r"dog\.jpg: lines 2 and 4 have the same"),
    ("list.txt", b"dog a\ndog.jpg a\n", r"dog\.jpg: lines 1 and 2 have the same file"),
    ("list.txt", b"cat dog\n", r"root/cat: is not a file"),
    ("metadata.csv", "file_name,split\n0.png\n", r"line 2: has 1 column"),
    ("metadata.csv", 'file_name,split\n0.png,"val\n', r"line 3: the row that begins in line 2 is not CSV"),
    ("metadata.csv", "file_name,age\n0.png,1\n1.png\n2.png\n", r"line 3: has 1 column, but the first line has 2; .*the first of 2"),
    ("metadata.csv", "file_name,age\n0.png,1\n1.png,2\n2.png,3\n", r"line 4: 2\.png is missing"),
    ("metadata.csv", "file_name,age\n0.png,1\n", r"1\.png: has no row in the table"),
    ("metadata.csv", "file_name,age\n0.png,1\n0.png,2\n1.png,3\n", r"lines 2 and 3 have the same record key"),
    ("metadata.csv", "file_name,age\r0.png,1\r1.png,3\r", r"line 1: is not CSV .*end lines with a line feed"),
    ("metadata.csv", "file_name,age\n0.png,\0\n1.png,3\n", r"line 2: has a NUL byte"),
    ("metadata.csv", 'file_name,age\n0.png,"1\n1.png,3\n', r"line 4: the row that begins in line 2 is not CSV"),
    ("metadata.csv", 'file_name,age\n0.png,"1"x\n1.png,3\n', r"line 2: the row that begins in line 2 is not CSV"),
    ("metadata.csv", "file_name,age\n../0.png,1\n1.png,3\n", r"line 2: .*without \.\."),
    ("metadata.csv", "file_name,age\n/etc/passwd,1\n1.png,3\n", r"line 2: names a file that is not beside the table"),
    ("metadata.csv", "file_name,age,age\n0.png,1,1\n", r"line 1: has two columns with the same name"),
    ("metadata.csv", "path,age\n0.png,1\n", r"has no column 'file_name'.*--path-column"),
    ("metadata.csv", "", r"line 1: is empty"),
    ("metadata.csv", "file_name,x\n0.png,\xff\n".encode("latin-1"), r"line 2: is not UTF-8"),
    ("metadata.jsonl", '{"file_name": "0.png"}\n{"file_name": "1.png", "a": 1}\n', r"line 2: .*has 'a', unlike"),
    ("metadata.jsonl", '{"file_name": "0.png", "a": 1}\n{"file_name": "1.png"}\n', r"line 2: .*has no 'a'"),
    ("metadata.jsonl", '{"file_name": "0.png", "a": NaN}\n', r"line 1: NaN is not JSON"),
    ("metadata.jsonl", '{"file_name": "0.png", "a": 1}\n{"file_name": 3, "a": 1}', r"line 2: names a file that is not"),
    ("metadata.jsonl", '{"file_name": "0.png"}\n[1]\n', r"line 2: .*is not a JSON object"),
    ("metadata.jsonl", '{"file_name": "0.png"}\n' + "[" * 100_000, r"line 2: .*is not a row"),
    ("metadata.jsonl", '{"file_name": "0.png", "a": "' + "x" * (17 << 20) + '"}', r"line 1: has more than"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "match"), HOSTILE)
def test_a_table_that_cannot_be_used_is_an_error_with_its_line_and_cases_of_one_kind_are_counted(
    name: str, data: str | bytes, match: str, root: Path, tmp_path: Path
) -> None:
    is_list = name.startswith("list")
    if not is_list:
        shutil.rmtree(root)
        write_pictures(root, ["0.png", "1.png"])
    path = (tmp_path if is_list else root) / name
    write(path, data if isinstance(data, bytes) else data.encode())

    source = recognise(path, options=SourceOptions(root=root)) if is_list else recognise(root)
    with pytest.raises(UsageError if "has no column" in match else DataError, match=match):
        source.listing("train")


@pytest.mark.parametrize("follow", [False, True])
def test_a_file_with_too_long_a_name_is_missing(root: Path, tmp_path: Path, follow: bool) -> None:
    long = {"n" * 300 + ".jpg": "cat", "folder/" + "m" * 300 + ".jpg": "dog"}
    write(tmp_path / "list.txt", "".join(f"{path} {one}\n" for path, one in (ROWS | long).items()).encode())
    options = SourceOptions(root=root, follow_symlinks=follow)
    with pytest.raises(SourceIncomplete, match=r"4 images, not 6 \(2 files missing"):
        convert(tmp_path / "list.txt", tmp_path / "out", source_options=options, workers=0)


def test_a_link_is_refused_and_counted_or_followed_and_absolute_paths_may_begin_with_one_to_the_root(
    root: Path, tmp_path: Path
) -> None:
    for name in ("link.jpg", "other.jpg"):
        (root / name).symlink_to(root / "dog.jpg")
    (root / "folder").symlink_to(root / "cat")
    text = "link.jpg a\nother.jpg a\nfolder/1.jpg a\n"

    with pytest.raises(SourceDamaged, match=r"link\.jpg: .*--follow-symlinks \(the first of 3\)"):
        listing(tmp_path / "list.txt", text, root)
    found = listing(tmp_path / "list.txt", text, root, follow_symlinks=True)

    wanted = {"link.jpg": "dog.jpg", "other.jpg": "dog.jpg", "folder/1.jpg": "cat/1.jpg"}
    assert {key: data for key, (_, data) in contents(found).items()} == {k: image(wanted[k]) for k in wanted}
    assert found.options == {"follow_symlinks": True}

    (tmp_path / "link").symlink_to(root)
    lines = f"image_id,label\n{tmp_path}/link/dog.jpg,dog\n/cat/1.jpg,cat\ne\u0301te\u0301/2,dog\n"  # Places365, Kaggle
    found = contents(listing(tmp_path / "list.csv", lines, tmp_path / "link"))
    wanted = {"dog.jpg": "dog.jpg", "cat/1.jpg": "cat/1.jpg", "e\u0301te\u0301/2": "été/2.jpg"}
    assert found == {key: (int("cat" not in key), image(wanted[key])) for key in wanted}
    (root / "dog.png").write_bytes(image("dog.jpg"))
    with pytest.raises(SourceDamaged, match=r"line 1: dog is dog\.jpg or dog\.png; add the extension"):
        listing(tmp_path / "list.txt", "dog dog\n", root)


TABLE = [
    dict(zip(("path", "label", "Caption", "split", "id", "note"), row, strict=True))
    for row in (
        ("cat/1.jpg", "cat", "a, b", "train", 7, "x"),
        ("dog.jpg", "dog", 'two\n"lines"', "Validation", 8, "y"),
        ("cat/a b.jpg", "cat", "", "train", 9, "z"),
        ("\u00e9t\u00e9/2.jpg", "bird", "c", "TEST", 1, ""),
        ("fox.jpg", "dog", "d", "Valid", 3, "w"),
    )
]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "root", [row["path"] for row in TABLE])
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "metadata.csv", "metadata.jsonl"])
def test_columns_are_taken_on_request_and_splits_kept_apart(
    name: str, pictures: Path, tmp_path: Path
) -> None:
    is_list = name.startswith("list")
    names_as = {"path": "path" if is_list else "file_name"}
    table = [{names_as.get(column, column): value for column, value in row.items()} for row in TABLE]
    text = (as_csv if name.endswith("csv") else as_json_lines)(table)
    write((tmp_path if is_list else pictures) / name, text.encode())
    source, root = (tmp_path / name, ["--root", pictures]) if is_list else (pictures, [])
    words = [*root, "--workers", 0, "--quiet"]
    columns = ["--column", "caption:text=Caption", "--column", "id:int"]
    done = prep_here("convert", source, tmp_path / "out", *words, *columns, "--json")
    one = prep_here("convert", source, tmp_path / "one", *words, "--split", "val", *columns)
    (tmp_path / "out/train/shard-00000.lmdb").unlink()
    repaired = prep_here("repair", tmp_path / "out/train", "--source", source, *root, "--workers", 0)
    if is_list:
        plain = prep_here("convert", source, tmp_path / "plain", *words)
        assert "columns left out: Caption, id, note; take one with --column NAME" in plain.stderr
    for found in json.loads(done.stdout)["splits"]:
        assert found["notes"] == ["columns left out: note; take one with --column NAME"]
        assert found["columns"] == {"caption": "text", "id": "int"}
    assert (one.returncode, repaired.returncode) == (0, 0), one.stderr + repaired.stderr
    assert read_manifest(tmp_path / "one").root == read_manifest(tmp_path / "out/val").root
    rows = {row["path"]: row for row in TABLE}
    for split in ("train", "val", "test"):
        with open_dataset(tmp_path / "out" / split) as opened:
            assert (names := opened.classes) == ("bird", "cat", "dog")
            expected = {path for path, row in rows.items() if row["split"].lower().startswith(split[:3])}
            assert {record.key for record in opened} == expected
            for record in opened:
                row = rows[record.key]
                assert (names[record.label], record["caption"]) == (row["label"], row["Caption"])
                assert record["id"] == row["id"]


@pytest.mark.parametrize(
    ("name", "text", "columns", "match"),
    [
        ("a.csv", "path,label,split\ndog.jpg,1,dev\n", (), r"line 2: has the split 'dev', .*are train"),
        ("a.csv", "path,label,split\ndog.jpg,1,\n", (), r"line 2: has the split ''"),
        ("a.jsonl", '{"path": "dog.jpg", "label": 1, "split": 3}', (), r"line 1: has the split '3'"),
        ("a.csv", "path,label\ndog.jpg,1\n", ("x:int",), r"no column 'x'; its columns are: path, label"),
        ("a.csv", "dog.jpg,1\n", ("x:int",), r"has no column 'path' .*; choose .*-path-column: dog\.jpg, 1$"),
        ("a.csv", "path,label,x,x\ndog.jpg,1,2,3\n", ("x:int",), r"has the column 'x' twice"),
        ("a.csv", "path,label,x\ndog.jpg,1,a\n", ("x:int",), r"dog\.jpg: a\.csv, line 2: the column x: "),
        ("a.jsonl", '{"path":"a","label":1,"x":1}\n{"path":"b","label":1}', ("x:int",), "line 2: .*no 'x'"),
        ("a.csv", "path,label,x\ndog.jpg,1,{\n", ("x:json",), r"line 2: the column x: is not JSON"),
        ("a.jsonl", '{"path": "dog.jpg", "label": 1, "x": []}', ("x:int8[2]",), r"line 1: .* expected int8\[2\]"),
        ("a.txt", "dog.jpg 1\n", ("x:int",), r"needs named columns"),
        ("a.csv", "path,label,x\ndog.jpg,1,a\n", ("label:text=x",), "reserved"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_taken_is_an_error(
    name: str, text: str, columns: tuple[str, ...], match: str, pictures: Path, tmp_path: Path
) -> None:
    write(tmp_path / name, text.encode())
    options = SourceOptions(root=pictures, columns=columns)
    with pytest.raises(ShardprepError, match=match):
        convert(tmp_path / name, tmp_path / "out", source_options=options, workers=0)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "root/metadata.csv"])
def test_images_have_no_labels_on_request_and_keys_of_later_objects_are_said_to_be_left_out(
    name: str, root: Path, tmp_path: Path
) -> None:
    table: list[dict[str, Any]] = [{"path": path, "label": label} for path, label in ROWS.items()]
    table[-1] |= {"note": 2} if name == "a.jsonl" else {}
    write(tmp_path / name, (as_csv if name.endswith("csv") else as_json_lines)(table).encode())
    options = SourceOptions(root=None if "/" in name else root, path_column="path", label_column="")
    found = recognise(root if "/" in name else tmp_path / name, options=options).listing("train")
    assert (len(found.entries), {*found.entries["label"].tolist()}, len(found.labels)) == (len(ROWS), {-1}, 0)
    assert name != "a.jsonl" or found.notes[0].startswith("columns left out: label, note;")


def test_files_of_a_list_that_are_no_images_are_left_out_and_mustard_is_not_ustar(
    pictures: Path, tmp_path: Path
) -> None:
    write(pictures / "notes.txt", b"x")
    write(tmp_path / "a.txt", b"dog.jpg mustard\nnotes.txt mustard\n")
    options = SourceOptions(root=pictures, skip_non_images=True)
    (done,) = convert(tmp_path / "a.txt", tmp_path / "out", source_options=options, workers=0)
    assert (done.manifest.records, done.ignored) == (1, {"non-image files": 1})


def test_classes_that_look_alike_or_have_another_number_in_the_split_beside_are_noted(
    pictures: Path, tmp_path: Path
) -> None:
    options = SourceOptions(root=pictures)
    for split, text in (("train", "dog.jpg dog\ncat/1.jpg cat\n"), ("val", "dog.jpg cat\ncat/1.jpg Cat\n")):
        write(path := tmp_path / f"{split}.txt", text.encode())
        (planned,) = plan_conversion(path, tmp_path / "out", source_options=options).splits
        (done,) = convert(path, tmp_path / "out", source_options=options, workers=0)
        write(table := tmp_path / "kinds.csv", f"path,kind\n{text.replace(' ', ',')}".encode())
        joined = join(done.path, {"kind:label": table}, workers=0)
    assert planned.notes[0].startswith("'Cat' and 'cat' are two classes; if they are one")
    assert planned.notes == done.notes[:1]
    assert done.notes[1].startswith("cat is class 1 here and 0 in train beside it; convert both at once")
    assert joined.notes[1].startswith("cat in the column kind is class 1 here and 0 in train beside it; take")


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
        | {"sex": ("f", "")[number % 2], "about": '{"a": [1, null]}', "Size": str(number)}
        for number, name in enumerate(NAMES)
    ]
    columns = ("age=How old", "tags:labels", "box:uint8[2]", "sex:label", "about:json", "size:float=Size")
    options = SourceOptions(columns=columns)
    (done,) = convert(folder_with(tmp_path / "s", rows), tmp_path / "out", workers=0, source_options=options)
    assert [done.manifest.schema[name].classes for name in ("tags", "sex")] == [("big", "new"), ("f",)]
    assert done.manifest.source["columns"] == [*columns]
    for number, name in enumerate(NAMES):
        found = values(done.path)[name]
        assert (type(found["age"]), found["age"]) == (int, number)
        assert (type(found["size"]), found["size"]) == (float, number)
        assert found["sex"] == (-1 if number % 2 else 0)
        assert found["about"] == {"a": [1, None]}
        np.testing.assert_array_equal(found["tags"], [0, 1] if number % 2 else [])
        np.testing.assert_array_equal(found["box"], np.array([1, 2], np.uint8))


def test_labels_in_json_are_lists_null_is_nan_and_doubtful_classes_are_noted(tmp_path: Path) -> None:
    cells = ([], 1, 10, [[1]]), (["new"], 0.5, 9, []), (["new", "NaN"], None, 8, [[None], [2]])
    rows = [{"file_name": f"{n}.png"} | dict(zip("abcd", cell, strict=True)) for n, cell in enumerate(cells)]
    kinds = SourceOptions(columns=("a:labels", "b:float", "c:label", "d:float32[*,1]"))
    options: Any = {"source_options": kinds, "workers": 0}
    (done,) = convert(folder_with(tmp_path / "s", rows, "metadata.jsonl"), tmp_path / "out", **options)
    found = [[row["a"].tolist(), row["b"], row["d"].tolist()] for _, row in sorted(values(done.path).items())]
    assert str(found) == "[[[], 1.0, [[1.0]]], [[1], 0.5, []], [[0, 1], nan, [[nan], [2.0]]]]"
    missing, numbers = done.notes
    assert missing.startswith("NaN is a class; if")
    assert numbers == "10 in the column c is class 0; to keep the numbers, take the column as int"
    rows[1]["a"] = "new"
    with pytest.raises(SourceDamaged, match="has labels that are not a list: 'new'"):
        convert(folder_with(tmp_path / "text", rows, "metadata.jsonl"), tmp_path / "text_out", **options)


def test_kinds_and_classes_are_guessed_from_all_rows_but_those_of_missing_files(tmp_path: Path) -> None:
    columns = (["1", "", "2"], ["1", "2.5", "nan"], ["1", "2", "x"], ["", "", ""], ["-1", "2", "3"])
    cells = dict(zip("abcde", columns, strict=True))
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
    write_pictures(tmp_path / "missing", ["a/0.png", "b/1.png"])
    write(tmp_path / "missing/metadata.csv", b"file_name,age\na/0.png,1\nb/1.png,2\nloose.png,old\n")
    survey = recognise(tmp_path / "missing").survey("train")
    assert ([each.name for each in survey.labels.classes], survey.schema["age"].kind) == (["a", "b"], "int")
    assert survey.problems


def test_folders_are_no_classes_where_another_split_has_a_column_of_labels(tmp_path: Path) -> None:
    labelled = [{"file_name": n, "label": label} for n, label in zip(NAMES, (*"abcab", "", -1), strict=True)]
    folder_with(tmp_path / "source" / "train", labelled)
    folder_with(tmp_path / "source" / "val", [{"file_name": f"c{n}/{n}.png"} for n in range(5)])
    train, val = convert(tmp_path / "source", tmp_path / "out", workers=0)
    assert [values(train.path)[name]["class"] for name in NAMES] == [*"abcab", None, None]
    assert {each["class"] for each in values(val.path).values()} == {None}


def test_a_number_of_json_that_no_float_holds_is_an_error_or_stays_exact(tmp_path: Path) -> None:
    rows = [{"file_name": "0.png", "a": 9007199254740993}, {"file_name": "1.png", "a": 0.5}]
    (done,) = convert(folder_with(tmp_path / "s", rows, "metadata.jsonl"), tmp_path / "out", workers=0)
    write(tmp_path / "s/metadata.jsonl", b'{"file_name": "0.png", "a": 1e400}\n')
    assert values(done.path)["0.png"]["a"] == 9007199254740993
    with pytest.raises(DataError, match="1e400 is too large for a float"):
        recognise(tmp_path / "s").listing("train")
