"""The next command: what results end with."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from support.datasets import converted, flip, prep, prep_here, writable


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
    """The same shards, to damage."""
    shutil.copytree(made / "my shards", tmp_path / "my shards")
    (tmp_path / "the archives").symlink_to((made / "the archives").resolve())
    return tmp_path


@pytest.mark.torture
def test_what_was_complete_and_intact_is_measured_next(made: Path) -> None:
    words = ["convert", "the archives", "my shards", "--workers", 0, "--shard-size", "200K"]

    done = prep_here(*words, cwd=made)

    assert last(done.stdout) == "next: prep bench-loader 'my shards'"


@pytest.mark.parametrize(
    "provenance",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"command": [], "folder": "/"}',
        b'{"command": ["prep", "convert", "a\\u0000b", "c"], "folder": "/"}',
        b'{"command": ["prep", "convert", "gone", "c"], "folder": "/"}',
        b'{"command": ["prep", "convert", {"a": 1}, [2]], "folder": "/"}',
        b'{"command": ["train.py", "x", "y"], "folder": "/"}',
        b'{"command": ["prep", "convert", "--nonsense"], "folder": null}',
    ],
)
def test_a_source_that_is_not_known_is_left_to_name(folder: Path, provenance: bytes) -> None:
    flip(folder / "my shards" / "val" / "shard-00000.lmdb")
    writable(folder / "my shards" / "val" / "provenance.json").write_bytes(provenance)

    done = prep_here("verify", "my shards/val", cwd=folder)

    assert done.returncode == 1
    assert last(done.stdout) == "next: prep repair 'my shards/val' --source SOURCE"


def test_each_damaged_split_has_its_command_and_a_file_that_does_not_belong_is_no_case_for_repair(
    folder: Path,
) -> None:
    flip(folder / "my shards" / "train" / "shard-00000.lmdb")
    flip(folder / "my shards" / "test" / "shard-00000.lmdb")
    (folder / "my shards" / "val" / "notes.txt").touch()

    said = prep_here("verify", "my shards", cwd=folder).stdout
    extra = prep_here("verify", "my shards/val", cwd=folder).stdout

    assert said.count("next: prep repair 'my shards/") == 2
    assert last(extra) == "next: move the files that do not belong to the dataset elsewhere"


def test_without_a_manifest_the_conversion_is_next(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dataset = folder / "my shards" / "val"
    (dataset / "manifest.json").unlink()

    lost = prep_here("verify", dataset).stdout
    (dataset / ".prep").mkdir()
    unfinished = prep_here("verify", dataset).stdout
    none = prep_here("verify", tmp_path_factory.mktemp("none")).stdout

    assert "into another folder" in last(lost)
    assert last(unfinished).startswith(
        "next: run the prep command that began it, such as prep convert, again"
    )
    assert last(none).startswith("next: give a folder that prep convert made")


def test_the_current_folder_may_be_gone(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        converted(archives, tmp_path / "out", split="val")

    assert json.loads((tmp_path / "out" / "provenance.json").read_bytes())["folder"] is None
