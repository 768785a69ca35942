"""The next command: what results end with."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from support.datasets import converted, flip, prep, prep_here


def last(text: str) -> str:
    return text.splitlines()[-1]


@pytest.fixture(scope="module")
def made(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with archives, and with shards that ``prep convert`` made there."""
    folder = tmp_path_factory.mktemp("made here")
    (folder / "the archives").symlink_to(archives)
    prep(
        "convert", "the archives", "my shards", "--workers", 1, "--shard-size", "200K", cwd=folder, check=True
    )
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "my shards", tmp_path / "my shards")
    (tmp_path / "the archives").symlink_to((made / "the archives").resolve())
    return tmp_path


@pytest.mark.torture
def test_what_was_complete_and_intact_is_measured_next(made: Path) -> None:
    words = ["convert", "the archives", "my shards", "--workers", 0, "--shard-size", "200K"]
    assert last(prep_here(*words, cwd=made).stdout) == "next: prep bench-loader 'my shards'"


def test_each_damaged_split_has_its_command_and_a_file_that_does_not_belong_is_no_case_for_repair(
    folder: Path,
) -> None:
    flip(folder / "my shards" / "train" / "shard-00000.lmdb")
    flip(folder / "my shards" / "test" / "shard-00000.lmdb")
    (folder / "my shards" / "val" / "notes.txt").touch()

    said = prep_here("verify", "my shards", cwd=folder).stdout
    extra = prep_here("verify", "my shards/val", cwd=folder).stdout

    assert said.count("next: prep repair 'my shards/") == 2
    assert "next: prep repair 'my shards/train' --source SOURCE\n" in said
    assert last(extra) == "next: move the files that do not belong to the dataset elsewhere"


def test_without_a_manifest_the_conversion_is_next(folder: Path) -> None:
    dataset = folder / "my shards" / "val"
    (dataset / "manifest.json").unlink()

    assert last(prep_here("verify", dataset).stdout).startswith(
        "next: if prep convert was interrupted, run it"
    )


def test_the_current_folder_may_be_gone(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        converted(archives, tmp_path / "out", split="val")

    assert json.loads((tmp_path / "out" / "provenance.json").read_bytes())["folder"] is None
