"""What is said of columns in short: the summary, ``prep inspect`` and the look of a dataset."""

import json
from pathlib import Path

import pytest

from shardprep.cli.app import run
from shardprep.formats import inspect, open_dataset
from support.column_datasets import EVERY_KIND, every_kind, write_columns
from support.image_files import JPEG


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summary") / "d"
    write_columns(folder)
    return folder


def test_a_summary_has_each_column(dataset: Path) -> None:
    columns = {column.name: column for column in inspect(dataset).columns}

    assert [(column.name, column.kind) for column in columns.values()] == [
        (f.name, f.kind) for f in EVERY_KIND
    ]
    assert (columns["mask"].bytes, columns["mask"].lengths) == (12 * len(JPEG), (len(JPEG),) * 4)
    assert (columns["age"].bytes, columns["age"].lengths, columns["age"].classes) == (96, None, 0)
    labels = [every_kind(number)["colour"] for number in range(12)]
    assert (columns["colour"].per_class, columns["colour"].unlabelled) == ((4, 4), labels.count(-1))
    assert (columns["tags"].classes, columns["tags"].per_class) == (3, None)
    assert columns["caption"].disk_bytes >= columns["caption"].bytes


def test_inspect_prints_columns_and_their_json(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(dataset)]) == 0
    shown = capsys.readouterr().out
    assert run(["inspect", str(dataset), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert "column colour" in shown
    assert "label, 48 B" in shown
    assert [column["name"] for column in found["columns"]] == list(EVERY_KIND.names)
    assert found["columns"][6]["per_class"] == [4, 4]


def test_records_without_images_have_no_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_columns(tmp_path / "d", image=None)

    summary = inspect(tmp_path / "d")
    assert run(["inspect", str(tmp_path / "d")]) == 0

    assert (summary.has_images, summary.images, summary.kinds, summary.oddities) == (False, {}, {}, {})
    shown = capsys.readouterr().out
    assert "12 records" in shown
    assert "pixels" not in shown


def test_a_dataset_shows_its_columns_shortly(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        look = repr(opened).replace(str(dataset), "P")

    assert look.startswith("<Dataset 'P': 12 records, train, columns mask, sound,")
    assert len(look) < 110
