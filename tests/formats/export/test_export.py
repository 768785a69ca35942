"""An export has every record and column as it is, in the same bytes however it is made and interrupted."""

import io
import json
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats import (  # fmt: skip
    CorruptRecord,
    PlanMismatch,
    UsageError,
    convert,
    export,
    join,
    open_dataset,
)
from shardprep.formats.exports.croissant import Croissant
from shardprep.formats.exports.export import FORMATS, MARKER
from shardprep.formats.exports.folders import Folders
from shardprep.formats.exports.format import Exportable, ExportFormat
from shardprep.formats.exports.mds import MDS
from shardprep.formats.exports.parquet import Parquet
from shardprep.formats.exports.webdataset import WebDatasetTars
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.schema import Schema
from shardprep.formats.shards.tables import index_dtype
from support.column_datasets import every_kind, write_columns
from support.datasets import converted, prep_here, tree, writable
from support.exports import mds_array, mds_samples, tfrecord_features, webdataset_samples
from support.image_files import JPEG
from support.sampling import torture_except
from support.source_builders import write

SIZE = 60_000
every_format = pytest.mark.parametrize("to", FORMATS)


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    convert(archives, folder, workers=0, split="train")
    return folder


@pytest.fixture(scope="module")
def whole(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of an unbroken export to each format."""
    folder = tmp_path_factory.mktemp("whole")
    for to in FORMATS:
        export(intact, folder / to, to=to, shard_size=SIZE, workers=0)
    return {to: folder / to for to in FORMATS}


@pytest.mark.slow
@pytest.mark.parametrize("to", torture_except(FORMATS, "webdataset"))
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    intact: Path, whole: dict[str, Path], to: str, tmp_path: Path
) -> None:
    export(intact, tmp_path, to=to, shard_size=SIZE, workers=3)

    assert tree(tmp_path) == tree(whole[to])
    assert len(tree(tmp_path)) > 5


@every_format
def test_a_finished_export_is_recognised_and_what_is_damaged_is_built_again(
    intact: Path, whole: dict[str, Path], to: str, tmp_path: Path
) -> None:
    shutil.copytree(whole[to], tmp_path / "out")
    (again,) = export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)
    files = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file() and p.name != MARKER]
    writable(files[0]).write_bytes(b"damaged")
    files[-1].unlink()

    (mended,) = export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)

    assert (again.already_complete, mended.already_complete) == (True, False)
    assert again.files == mended.files
    assert tree(tmp_path / "out") == tree(whole[to])


def test_a_folder_with_anything_else_is_refused_and_left_alone(
    intact: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("text")

    with pytest.raises(UsageError, match="not empty, and is not an export begun here"):
        export(intact, tmp_path, to="mds", workers=0)
    with pytest.raises(PlanMismatch, match="finished export: --to was folders, is now mds"):
        export(intact, whole["folders"], to="mds", shard_size=SIZE, workers=0)
    with pytest.raises(UsageError, match="lies in the source"):
        export(intact, intact / "tars", to="webdataset", workers=0)
    with pytest.raises(UsageError, match="not a folder"):
        export(intact, tmp_path / "mine", to="mds", workers=0)
    with pytest.raises(UsageError, match="known are webdataset, tfrecord, mds, parquet, croissant, folders"):
        export(intact, tmp_path / "out", to="zip", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_export_writes_through_no_link_in_its_output(
    intact: Path, whole: dict[str, Path], is_finished: bool, tmp_path: Path
) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if is_finished:
        shutil.copytree(whole["folders"], output)
    else:
        (output / ".prep").mkdir(parents=True)
    name = next(path.name for path in whole["folders"].iterdir() if path.is_dir())
    shutil.copytree(whole["folders"] / name, elsewhere)
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).symlink_to(elsewhere)
    before = {path.name: path.stat().st_ino for path in elsewhere.iterdir()}

    with pytest.raises(UsageError, match="a link or a file where a folder belongs"):
        export(intact, output, to="folders", shard_size=SIZE, workers=0)

    assert {path.name: path.stat().st_ino for path in elsewhere.iterdir()} == before


def test_a_damaged_record_ends_the_export_and_is_named(dataset: Path, tmp_path: Path) -> None:
    (shard,) = dataset.glob("*.lmdb")
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff", len(data) // 2) + 200
    data[at] ^= 1
    writable(shard).write_bytes(data)

    with pytest.raises(CorruptRecord) as caught:
        export(dataset, tmp_path / "out", to="webdataset", workers=0)

    assert caught.value.key
    assert not (tmp_path / "out" / MARKER).exists()


def test_the_command_says_what_it_wrote(intact: Path, tmp_path: Path) -> None:
    words = ("export", intact, tmp_path / "out", "--to", "webdataset", "--workers", 0, "--quiet")

    first, second = prep_here(*words), prep_here(*words)
    machine = prep_here(*words, "--json")

    assert re.fullmatch(r"\S+out: 24 images, [\d.]+ KB in 1 file of webdataset\n", first.stdout)
    assert second.stdout == first.stdout.replace("\n", " (was complete, and is intact)\n")
    assert '"train-000000.tar"' in machine.stdout


@pytest.fixture(scope="module")
def with_columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder)
    return folder


def wanted(with_columns: Path) -> list[dict[str, Any]]:
    """The values of each record, in order; arrays and labels as lists."""
    with open_dataset(with_columns) as opened:
        numbers = [int(record.key[1:]) for record in opened]
    lists = ("boxes", "vector")
    return [
        {name: value.tolist() if name in lists else value for name, value in every_kind(number).items()}
        for number in numbers
    ]


def test_webdataset_has_each_column_as_a_file(with_columns: Path, tmp_path: Path) -> None:
    export(with_columns, tmp_path, to="webdataset", workers=0)

    names = {
        "mask": "mask.jpg", "sound": "sound.bin", "caption": "caption.txt", "about": "about.json", "age": "age.index",
        "score": "score.json", "colour": "colour.cls", "tags": "tags.json", "boxes": "boxes.npy", "vector": "vector.npy",
    }  # fmt: skip
    read = {"json": json.loads, "cls": int, "index": int, "txt": bytes.decode}
    for sample, values in zip(webdataset_samples(tmp_path), wanted(with_columns), strict=True):
        assert sample["jpg"] == JPEG
        for column, name in names.items():
            end = name.rpartition(".")[2]
            if end == "npy":
                found = np.load(io.BytesIO(sample[name]))
                assert found.dtype == every_kind(1)[column].dtype
                assert found.tolist() == values[column]
            else:
                assert read.get(end, bytes)(sample[name]) == values[column], name


def test_parquet_has_each_column_with_its_type(with_columns: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    export(with_columns, tmp_path, to="parquet", workers=0)

    table = pq.read_table(tmp_path / "train-00000-of-00001.parquet")

    for row, values in zip(table.to_pylist(), wanted(with_columns), strict=True):
        assert row["image"]["bytes"] == row["mask"]["bytes"] == JPEG
        assert json.loads(row.pop("about")) == values.pop("about")
        del values["mask"]
        assert {name: row[name] for name in values} == values
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["colour"] == {"_type": "ClassLabel", "names": ["blue", "red"]}
    assert features["boxes"]["feature"]["feature"] == {"_type": "Value", "dtype": "float32"}
    assert list(features) == table.column_names


def test_mds_has_each_column_with_its_encoding(with_columns: Path, tmp_path: Path) -> None:
    export(with_columns, tmp_path, to="mds", workers=0)

    encodings = {
        "mask": "bytes", "sound": "bytes", "caption": "str", "about": "json", "age": "int", "score": "float64",
        "colour": "int", "tags": "ndarray:int32", "boxes": "ndarray:float32", "vector": "ndarray:float16:3",
    }  # fmt: skip
    read = {
        "bytes": bytes, "str": bytes.decode, "json": json.loads,
        "int": lambda data: int.from_bytes(data, "little", signed=True),
        "float64": lambda data: float(np.frombuffer(data, "<f8")[0]),
        "ndarray:int32": lambda data: mds_array(data, "<i4").tolist(),
        "ndarray:float32": lambda data: mds_array(data, "<f4").tolist(),
        "ndarray:float16:3": lambda data: np.frombuffer(data, "<f2").tolist(),
    }  # fmt: skip
    for sample, values in zip(mds_samples(tmp_path), wanted(with_columns), strict=True):
        assert {name: sample[name][0] for name in encodings} == encodings
        assert {name: read[encoding](sample[name][1]) for name, encoding in encodings.items()} == values


@pytest.mark.slow
def test_tfrecord_has_each_column_as_features(with_columns: Path, tmp_path: Path) -> None:
    export(with_columns, tmp_path, to="tfrecord", workers=0)

    for features, values in zip(tfrecord_features(tmp_path), wanted(with_columns), strict=True):
        assert list(features["mask"].bytes_list.value) == [JPEG]
        assert list(features["sound"].bytes_list.value) == [values["sound"]]
        assert features["caption"].bytes_list.value[0].decode() == values["caption"]
        assert json.loads(features["about"].bytes_list.value[0]) == values["about"]
        assert [features[n].int64_list.value[0] for n in ("age", "colour")] == [
            values["age"],
            values["colour"],
        ]
        assert list(features["score"].float_list.value) == [np.float32(values["score"])]
        assert list(features["tags"].int64_list.value) == values["tags"]
        shape = list(features["boxes/shape"].int64_list.value)
        assert np.reshape(features["boxes"].float_list.value, shape).tolist() == values["boxes"]
        assert list(features["vector"].float_list.value) == values["vector"]


def test_folders_refuse_columns_of_bytes_by_name(with_columns: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"column mask of kind image cannot be exported to folders: .* export to"
    ):
        export(with_columns, tmp_path / "out", to="folders", workers=0)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", sorted(set(FORMATS) - {"folders"}))
def test_records_without_images_are_exported(to: str, tmp_path: Path) -> None:
    write_columns(tmp_path / "with_columns", image=None, schema=Schema({"age": "int"}))

    (done,) = export(tmp_path / "with_columns", tmp_path / "out", to=to, workers=0)

    assert done.records == 12
    if to == "mds":
        assert [*next(mds_samples(tmp_path / "out"))] == ["age", "key", "label"]
    with pytest.raises(UsageError, match="no images"):
        export(tmp_path / "with_columns", tmp_path / "folders", to="folders", workers=0)


ARRAYS = {
    "flag": np.array(True), "z": np.array([1 + 2j, 3], np.complex64), "empty": np.zeros((0, 3), np.int16),
    "big": np.array([2**64 - 1], np.uint64), "deep": np.arange(12, dtype=np.float64).reshape(2, 3, 2),
}  # fmt: skip
KINDS = {
    "flag": "bool[]",
    "z": "complex64[2]",
    "empty": "int16[*,3]",
    "big": "uint64[*]",
    "deep": "float64[2,*,2]",
}
AS_LISTS = {name: array.tolist() for name, array in ARRAYS.items()} | {"z": [[1.0, 2.0], [3.0, 0.0]]}


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_arrays_of_every_sort_are_exported(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.column_datasets.every_kind", lambda number: {n: ARRAYS[n] for n in KINDS})
    write_columns(tmp_path / "with_columns", schema=Schema(KINDS))

    export(tmp_path / "with_columns", tmp_path / "out", to=to, workers=0)

    reader = {
        "webdataset": arrays_in_tar,
        "mds": arrays_in_mds,
        "tfrecord": arrays_in_tfrecord,
        "folders": arrays_in_folders,
    }.get(to, arrays_in_parquet)
    found = reader(tmp_path / "out")
    assert found == (AS_LISTS | {"flag": int(True)} if to in ("mds", "tfrecord") else AS_LISTS)


def arrays_in_tar(folder: Path) -> dict[str, Any]:
    sample = webdataset_samples(folder)[0]
    found = {name: np.load(io.BytesIO(sample[f"{name}.npy"])) for name in KINDS}
    return {
        name: [[v.real, v.imag] for v in array.tolist()] if name == "z" else array.tolist()
        for name, array in found.items()
    }


def arrays_in_mds(folder: Path) -> dict[str, Any]:
    sample = next(mds_samples(folder))
    assert (sample["flag"][0], sample["z"][0]) == ("uint8", "ndarray:float32:2,2")
    return {
        "flag": sample["flag"][1][0],
        "z": np.frombuffer(sample["z"][1], "<f4").reshape(2, 2).tolist(),
        "empty": mds_array(sample["empty"][1], "<i2").tolist(),
        "big": mds_array(sample["big"][1], "<u8").tolist(),
        "deep": mds_array(sample["deep"][1], "<f8").tolist(),
    }


def arrays_in_tfrecord(folder: Path) -> dict[str, Any]:
    features = next(tfrecord_features(folder))
    raw = {name: features[name].bytes_list.value for name in KINDS}
    shapes = {name: list(features[f"{name}/shape"].int64_list.value) for name in KINDS}
    assert list(features["empty"].int64_list.value) == []
    return {
        "flag": features["flag"].int64_list.value[0],
        "z": np.frombuffer(raw["z"][0], "<f4").reshape(2, 2).tolist(),
        "empty": np.zeros(shapes["empty"]).tolist(),
        "big": np.frombuffer(raw["big"][0], "<u8").tolist(),
        "deep": np.frombuffer(raw["deep"][0], "<f8").reshape(shapes["deep"]).tolist(),
    }


def arrays_in_parquet(folder: Path) -> dict[str, Any]:
    pq = pytest.importorskip("pyarrow.parquet")
    row = pq.read_table(folder / "train-00000-of-00001.parquet").to_pylist()[0]
    return {name: row[name] for name in KINDS}


def arrays_in_folders(folder: Path) -> dict[str, Any]:
    line = json.loads((folder / "metadata.jsonl").read_text().splitlines()[0])
    return {name: line[name] for name in KINDS}


LETTERS = st.sampled_from(
    ["a", "A", "b", ".", "..", "/", "%", " ", ".jpg", ".JPG", "%2E", "ä", "a\u0308", "\\", "\n"]
)
KEYS = st.lists(LETTERS, min_size=1, max_size=5).map("".join)
CLASSES = ("A", "a", "a.jpg", "b")


def source(classes: tuple[str, ...] = CLASSES) -> Exportable:
    return Exportable(
        path=Path("with_columns"), root="sha256:0", split="train", labels=LabelSpace.of(classes), schema=Schema(),
        has_images=True, has_labels=True, has_boxes=False,
    )  # fmt: skip


def index_of(keys: list[str], labels: list[int]) -> np.ndarray:
    rows = np.zeros(len(keys), index_dtype(max(len(key.encode()) for key in keys)))
    rows["key"], rows["label"] = [key.encode() for key in keys], labels
    return rows


def folded(name: str) -> str:
    return unicodedata.normalize("NFC", name.casefold())


@given(st.dictionaries(KEYS, st.integers(-1, len(CLASSES) - 1), min_size=1, max_size=8))
def test_files_have_different_safe_names_on_any_file_system(records: dict[str, int]) -> None:
    index = index_of(list(records), list(records.values()))

    names = Folders(source(), index).names(index)

    assert len({folded(name) for name in names}) == len(names)
    folders = {folded(str(parent)) for name in names for parent in Path(name).parents}
    assert not folders & {folded(name) for name in names}
    for name, label in zip(names, records.values(), strict=True):
        parts = name.split("/")
        assert all(part and not part.startswith(".") and part == part.rstrip(". ") for part in parts)
        assert not set(name) & set('\\:*?"<>|\n')
        assert len(parts) == 1 if label < 0 else len(parts) > 1


@pytest.mark.parametrize(
    ("to", "column"),
    [
        (MDS, "boxes"),
        (Parquet, "Objects"),
        (Croissant, "box_labels"),
        (Folders, "objects"),
        (WebDatasetTars, "boxes"),
    ],
)
def test_a_column_with_the_name_of_the_boxes_is_refused(to: type[ExportFormat], column: str) -> None:
    columns = replace(source(), schema=Schema({column: "json"}), has_boxes=True)

    with pytest.raises(UsageError, match=f"column {column} of kind json cannot be exported to {to.name}"):
        to(columns, index_of(["a"], [0]))


@pytest.mark.parametrize("name", ["metadata.jsonl", "Metadata.JSONL"])
def test_a_class_with_the_name_of_the_metadata_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    write(tmp_path / "source" / name / "a.jpg", JPEG)
    converted(tmp_path / "source", tmp_path / "plain")
    (tmp_path / "sizes.csv").write_text(f"key,size\n{name}/a.jpg,7\n")
    shutil.copytree(tmp_path / "plain", tmp_path / "joined")
    join(tmp_path / "joined", {"size": tmp_path / "sizes.csv"}, workers=0)

    with pytest.raises(UsageError, match=f"has a class '{name}', but a file of that name"):
        export(tmp_path / "joined", tmp_path / "out", to="folders", workers=0)

    assert not (tmp_path / "out").exists()
    export(
        tmp_path / "plain", tmp_path / "out", to="folders", workers=0
    )  # without columns there is no such file
    assert (tmp_path / "out" / name / "a.jpg").is_file()


def test_a_class_that_is_too_long_for_a_folder_is_refused_by_name_if_it_has_no_image() -> None:
    with pytest.raises(UsageError, match="more than 255 bytes") as caught:
        Folders(source(("a", "?" * 100)), index_of(["a/x.jpg"], [1]))

    assert caught.value.key == "?" * 100
