"""What is said of columns in short: the summary, ``prep inspect`` and the look of a dataset."""

import json
from pathlib import Path

import pytest

from shardprep.cli.app import run
from support.column_datasets import EVERY_KIND, write_columns


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summary") / "d"
    write_columns(folder)
    return folder


def test_inspect_prints_columns_and_their_json(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(dataset)]) == 0
    shown = capsys.readouterr().out
    assert run(["inspect", str(dataset), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert "column colour" in shown
    assert "label, 48 B" in shown
    assert [column["name"] for column in found["columns"]] == list(EVERY_KIND.names)
    assert found["columns"][6]["per_class"] == [4, 4]
