"""An export has every record and column as it is, in the same bytes however it is made and interrupted."""

import io
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from shardprep.formats import export, open_dataset, read_manifest, write_dataset
from shardprep.formats.errors import CorruptRecord, DataError, NoSpace, PlanMismatch, UsageError
from shardprep.formats.exports.export import FORMATS, MARKER
from shardprep.formats.exports.folders import Folders
from shardprep.formats.exports.format import ExportFormat, ExportSource
from shardprep.formats.exports.mds import MDS
from shardprep.formats.exports.parquet import Croissant, Parquet
from shardprep.formats.exports.webdataset import WebDatasetTars
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.records.schema import Schema
from shardprep.formats.shards.manifest import index_dtype
from support.column_datasets import EVERY_KIND, every_kind, write_columns, write_samples
from support.datasets import prep_here, tree, writable
from support.exports import mds_array, mds_samples, tfrecord_features, webdataset_samples
from support.image_files import JPEG
from support.sampling import torture_except

SIZE = 60_000


@pytest.fixture(scope="module")
def intact(splits: Path) -> Path:
    return splits / "train"


@pytest.fixture(scope="module")
def whole(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of an unbroken export to each format."""
    folder = tmp_path_factory.mktemp("whole")
    for to in FORMATS:
        export(intact, folder / to, to=to, shard_size=SIZE, workers=0)
    return {to: folder / to for to in FORMATS}


@pytest.mark.parametrize("to", FORMATS)
def test_the_room_that_is_needed_includes_what_the_format_adds_to_each_record(
    to: str, intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=read_manifest(intact).image_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    with pytest.raises(NoSpace, match="make room"):
        export(intact, tmp_path / "out", to=to, workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("to", torture_except(FORMATS, "webdataset"))
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    intact: Path, whole: dict[str, Path], to: str, tmp_path: Path
) -> None:
    export(intact, tmp_path, to=to, shard_size=SIZE, workers=3)

    assert tree(tmp_path) == tree(whole[to])
    assert len(tree(tmp_path)) > 5


@pytest.mark.parametrize("to", FORMATS)
def test_a_finished_export_is_recognised_what_is_damaged_is_built_again_and_a_damaged_marker_is_refused(
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
    marker = writable(tmp_path / "out" / MARKER)
    for damaged in (marker.read_bytes().replace(b'"size":', b'"size":-'), b"{}\n"):
        marker.write_bytes(damaged)
        with pytest.raises(DataError, match="was not written by an export"):
            export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)
    marker.unlink()
    os.mkfifo(marker)
    with pytest.raises(DataError, match="not a regular file"):
        export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)


def test_a_folder_with_anything_else_is_refused_and_left_alone(
    intact: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("text")

    with pytest.raises(UsageError, match="not empty, and is not an export to continue"):
        export(intact, tmp_path, to="mds", workers=0)
    with pytest.raises(PlanMismatch, match="finished export: --to was folders, is now mds"):
        export(intact, whole["folders"], to="mds", shard_size=SIZE, workers=0)
    with pytest.raises(UsageError, match="is inside the source"):
        export(intact, intact / "tars", to="webdataset", workers=0)
    for source, name in ((intact, "mine"), (intact, "mine/below"), (intact.parent, "mine")):
        with pytest.raises(UsageError, match="mine: is not a folder"):
            export(source, tmp_path / name, to="mds", workers=0)
    for wrong in list[dict[str, Any]]([{"to": "zip"}, {"to": "mds", "shard_size": "1MB"}]):
        with pytest.raises(UsageError, match=r"tfrecord, mds, parquet, croissant, folders|a whole number"):
            export(intact, tmp_path / "out", workers=0, **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_follows_a_link_to_a_folder_and_replaces_one_to_a_file(
    intact: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    output, elsewhere, mine = tmp_path / "out", tmp_path / "elsewhere", tmp_path / "mine"
    shutil.copytree(whole["folders"], output)
    folder = next(path for path in output.iterdir() if path.is_dir())
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    image = next(elsewhere.iterdir())
    image.unlink()
    mine.write_bytes(b"mine")
    image.symlink_to(mine)

    export(intact, output, to="folders", shard_size=SIZE, workers=0)

    assert mine.read_bytes() == b"mine"
    assert not image.is_symlink()
    assert image.read_bytes() == (whole["folders"] / folder.name / image.name).read_bytes()

    elsewhere.rename(tmp_path / "moved")
    done = prep_here("export", intact, output, "--to", "folders", "--shard-size", SIZE)
    assert f"{folder}: something else has that name; remove it" in done.stderr


def test_a_damaged_record_ends_the_export_and_is_named_and_a_repaired_one_is_read_again(
    dataset: Path, tmp_path: Path
) -> None:
    (shard,) = dataset.glob("*.lmdb")
    data = bytearray(whole := shard.read_bytes())
    data[data.index(b"\xff\xd8\xff", len(data) // 2) + 200] ^= 1
    writable(shard).write_bytes(data)

    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        with pytest.raises(CorruptRecord) as caught:
            export(dataset, tmp_path / "out", to="webdataset", executor=executor)

        assert caught.value.key
        assert not (tmp_path / "out" / MARKER).exists()
        shard.unlink()
        shard.write_bytes(whole)
        export(dataset, tmp_path / "out", to="webdataset", executor=executor)


def test_the_command_says_what_it_wrote(intact: Path, tmp_path: Path) -> None:
    words = ("export", intact, tmp_path / "out", "--to", "webdataset", "--workers", 0, "--quiet")

    first, second = prep_here(*words), prep_here(*words)
    machine = prep_here(*words, "--json")

    assert re.fullmatch(r"\S+out: 24 images, [\d.]+ KB in 1 file of webdataset\n", first.stdout)
    assert second.stdout == first.stdout.replace("\n", " (was complete, and is intact)\n")
    assert '"train-000000.tar"' in machine.stdout


ARRAYS = {
    "flag": np.array(True), "z": np.array([1 + 2j, 3], np.complex64), "empty": np.zeros((0, 3), np.int16),
    "big": np.array([2**64 - 1], np.uint64), "deep": np.arange(12, dtype=np.float64).reshape(2, 3, 2),
}  # fmt: skip
KINDS = {
    "flag": "bool[]", "z": "complex64[2]", "empty": "int16[*,3]", "big": "uint64[*]", "deep": "float64[2,*,2]"
}  # fmt: skip
FIELDS = [*EVERY_KIND, *Schema(KINDS)]


@pytest.fixture(scope="module")
def with_columns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dataset with columns of every kind for each format; folders hold no bytes."""
    made, folder = {}, tmp_path_factory.mktemp("columns")
    samples = [every_kind(number) | ARRAYS | {"image": JPEG} for number in range(12)]
    for name, without in (("all", ()), ("folders", ("mask", "sound"))):
        fields = [field for field in FIELDS if field.name not in without]
        write_samples(folder / name / "train", samples, Schema(fields))
        made[name] = folder / name / "train"
    return {to: made.get(to, made["all"]) for to in FORMATS}


def plain(value: Any) -> Any:
    """An array as lists, with two numbers for a complex one; any other value as it is."""
    if isinstance(value, np.ndarray):
        return (np.stack([value.real, value.imag], -1) if value.dtype.kind == "c" else value).tolist()
    return value


def in_webdataset(folder: Path) -> Iterator[dict[str, Any]]:
    read = {"json": json.loads, "cls": int, "index": int, "txt": bytes.decode, "npy": npy}
    for sample in webdataset_samples(folder):
        names = [name.rpartition(".") for name in sample if "." in name]
        assert {end for _, _, end in names} <= {"jpg", "bin", *read}
        yield {name: read.get(end, bytes)(sample[f"{name}.{end}"]) for name, _, end in names}


def npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data))


def in_parquet(folder: Path) -> Iterator[dict[str, Any]]:
    pq = pytest.importorskip("pyarrow.parquet")
    for row in pq.read_table(folder / "train-00000-of-00001.parquet").to_pylist():
        yield row | {"about": json.loads(row["about"]), "mask": row["mask"]["bytes"]}


def in_mds(folder: Path) -> Iterator[dict[str, Any]]:
    read: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes, "str": bytes.decode, "json": json.loads, "jpeg": bytes,
        "int": lambda data: int.from_bytes(data, "little", signed=True),
    }  # fmt: skip

    def value_of(encoding: str, data: bytes) -> Any:
        if encoding in read:
            return read[encoding](data)
        kind, *shape = encoding.removeprefix("ndarray:").split(":")
        if "ndarray" in encoding and not shape:
            return mds_array(data, kind)
        return np.frombuffer(data, kind).reshape([int(side) for side in "".join(shape).split(",") if side])

    for sample in mds_samples(folder):
        yield {name: value_of(*encoded) for name, encoded in sample.items()}


def in_tfrecord(folder: Path) -> Iterator[dict[str, Any]]:
    raw = {"z": "<f4", "big": "<u8", "deep": "<f8"}
    texts = {"caption": bytes.decode, "about": json.loads}
    for features in tfrecord_features(folder):
        found: dict[str, Any] = {}
        assert "tags/shape" not in features
        for name in (field.name for field in FIELDS):
            (value,) = (
                list(getattr(features[name], kind).value) for kind in LISTS if features[name].HasField(kind)
            )
            if f"{name}/shape" in features:
                shape = list(features[f"{name}/shape"].int64_list.value)
                array = np.frombuffer(value[0], raw[name]) if name in raw else np.array(value)
                found[name] = array.reshape(*shape, 2) if name == "z" else array.reshape(shape)
            else:
                found[name] = value if name == "tags" else texts.get(name, lambda one: one)(value[0])
        yield found


LISTS = ("bytes_list", "float_list", "int64_list")


COLUMNS_IN = {
    "webdataset": in_webdataset, "tfrecord": in_tfrecord, "mds": in_mds, "parquet": in_parquet,
    "croissant": in_parquet, "folders": lambda at: map(json.loads, (at / "metadata.jsonl").read_text().splitlines()),
}  # fmt: skip


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=[pytest.mark.slow] * (to == "tfrecord")) for to in FORMATS]
)
def test_columns_of_every_kind_are_read_back(with_columns: dict[str, Path], to: str, tmp_path: Path) -> None:
    export(with_columns[to], tmp_path, to=to, workers=0)

    found = list(COLUMNS_IN[to](tmp_path))

    with open_dataset(with_columns[to]) as opened:
        numbers, names = [int(record.key[1:]) for record in opened], opened.schema.names
    for values, number in zip(found, numbers, strict=True):
        wanted = every_kind(number) | ARRAYS
        if to == "tfrecord":
            wanted["score"] = np.float32(wanted["score"])
        assert {name: plain(values[name]) for name in names} == {name: plain(wanted[name]) for name in names}


def test_arrays_of_webdataset_keep_their_dtypes_and_columns_of_mds_and_parquet_have_types(
    with_columns: dict[str, Path], tmp_path: Path
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for to in ("webdataset", "parquet", "mds"):
        export(with_columns[to], tmp_path / to, to=to, workers=0)

    sample = next(in_webdataset(tmp_path / "webdataset"))
    table = pq.read_table(tmp_path / "parquet/train-00000-of-00001.parquet")
    encodings = {name: encoding for name, (encoding, _) in next(mds_samples(tmp_path / "mds")).items()}

    assert all(sample[name].dtype == array.dtype for name, array in ARRAYS.items())
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["colour"] == {"_type": "ClassLabel", "names": ["blue", "red"]}
    assert features["boxes"]["feature"]["feature"] == {"_type": "Value", "dtype": "float32"}
    assert list(features) == table.column_names
    assert encodings == {
        "image": "jpeg", "key": "str", "label": "int",
        "mask": "bytes", "sound": "bytes", "caption": "str", "about": "json", "age": "int", "score": "float64",
        "colour": "int", "tags": "ndarray:int32", "boxes": "ndarray:float32", "vector": "ndarray:float16:3",
        "flag": "uint8", "z": "ndarray:float32:2,2", "empty": "ndarray:int16", "big": "ndarray:uint64",
        "deep": "ndarray:float64",
    }  # fmt: skip


def test_folders_refuse_columns_of_bytes_by_name_and_a_class_without_one(
    with_columns: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"column mask of kind image cannot be exported to folders: .* export to"
    ):
        export(with_columns["mds"], tmp_path / "out", to="folders", workers=0)
    with pytest.raises(UsageError, match="has a class without a name"):
        Folders(source(("", "a")), index_of(["a"], [0]), [].append)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("classes", "is_noted"), [(["a1", "a:b"], True), (["a", "b:"], False)])
def test_quoted_classes_that_image_folder_numbers_differently_are_noted(
    classes: list[str], is_noted: bool, tmp_path: Path
) -> None:
    items = [{"image": JPEG, "label": name} for name in classes]
    write_dataset(items, tmp_path / "dataset", classes=classes, workers=0)
    done = prep_here("export", tmp_path / "dataset", tmp_path / "out", "--to", "folders")
    assert ("ImageFolder numbers these classes in another order" in done.stderr) == is_noted


@pytest.mark.parametrize("to", sorted(set(FORMATS) - {"folders"}))
def test_records_without_images_are_exported(to: str, tmp_path: Path) -> None:
    write_columns(tmp_path / "with_columns", image=None, schema=Schema({"age": "int"}))

    (done,) = export(tmp_path / "with_columns", tmp_path / "out", to=to, workers=0)

    assert done.records == 12
    if to == "mds":
        assert [*next(mds_samples(tmp_path / "out"))] == ["age", "key", "label"]
    with pytest.raises(UsageError, match="no images"):
        export(tmp_path / "with_columns", tmp_path / "folders", to="folders", workers=0)


LETTERS = st.sampled_from(
    ["a", "A", "b", ".", "..", "/", "%", " ", ".jpg", ".JPG", "%2E", "ä", "a\u0308", "\\", "\n"]
)
KEYS = st.lists(LETTERS, min_size=1, max_size=5).map("".join)
CLASSES = ("A", "a", "a.jpg", "b")


def source(classes: tuple[str, ...] = CLASSES) -> ExportSource:
    return ExportSource(
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
@example({"a": 0, "A": 0, "b": 0, "%41": 0, "\u00e4": -1, "a\u0308": -1})
def test_files_have_different_safe_names_on_any_file_system(records: dict[str, int]) -> None:
    index, done = index_of(list(records), list(records.values())), list[int]()

    names = Folders(source(), index, done.append).names(index)

    assert done[-1] == len(index)
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
        *((MDS, "boxes"), (Parquet, "Objects"), (Croissant, "box_labels")),
        *((Folders, "objects"), (WebDatasetTars, "boxes")),
    ],
)
def test_a_column_with_the_name_of_the_boxes_is_refused(to: type[ExportFormat], column: str) -> None:
    columns = replace(source(), schema=Schema({column: "json"}), has_boxes=True)

    with pytest.raises(UsageError, match=f"column {column} of kind json cannot be exported to {to.name}"):
        to(columns, index_of(["a"], [0]), [].append)
    to(replace(columns, has_boxes=False), index_of(["a"], [0]), [].append)
