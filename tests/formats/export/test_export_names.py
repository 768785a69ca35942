"""Names of files are safe and unique, whatever the keys and classes are."""

import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats import UsageError, export, join
from shardprep.formats.exports.croissant import Croissant
from shardprep.formats.exports.folders import Folders
from shardprep.formats.exports.format import Exportable, ExportFormat
from shardprep.formats.exports.mds import MDS
from shardprep.formats.exports.parquet import Parquet
from shardprep.formats.exports.webdataset import WebDatasetTars
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.schema import Schema
from shardprep.formats.shards.tables import index_dtype
from support.datasets import converted
from support.image_files import JPEG
from support.source_builders import write

LETTERS = st.sampled_from(
    ["a", "A", "b", ".", "..", "/", "%", " ", ".jpg", ".JPG", "%2E", "ä", "a\u0308", "\\", "\n"]
)
KEYS = st.lists(LETTERS, min_size=1, max_size=5).map("".join)
CLASSES = ("A", "a", "a.jpg", "b")


def source(classes: tuple[str, ...] = CLASSES) -> Exportable:
    return Exportable(
        path=Path("dataset"), root="sha256:0", split="train", labels=LabelSpace.of(classes), schema=Schema(),
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
