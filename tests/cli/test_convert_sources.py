"""The options of ``prep convert`` that say how a source is read."""

import json
from pathlib import Path

import pytest

from support.datasets import prep_here
from support.image_files import encoded, pixels
from support.source_builders import write


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(5):
            write(tmp_path / "photos" / name / f"{number}.png", encoded(pixels(8, 8 + number), ".png"))
    write(tmp_path / "photos/cat/.DS_Store", b"x")
    return tmp_path / "photos"


def test_what_was_left_out_of_the_source_is_said(photos: Path, tmp_path: Path) -> None:
    done = prep_here("convert", photos, tmp_path / "out", "--workers", 0, "--quiet")

    assert done.returncode == 0
    assert "  ignored       .DS_Store: 1\n" in done.stdout


def test_a_fraction_is_taken_for_val(photos: Path, tmp_path: Path) -> None:
    done = prep_here("convert", photos, tmp_path / "out", "--val-fraction", 0.2, "--json", "--workers", 0)

    splits = json.loads(done.stdout)["splits"]
    assert [(split["split"], split["records"], split["ignored"]) for split in splits] == [
        ("train", 8, {".DS_Store": 1}),
        ("val", 2, {}),
    ]


def test_a_list_is_converted_and_repaired(photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "photos.csv", b"picture,species\ncat/1.png,tabby\ndog/2.png,collie\n")
    words = ["--root", photos, "--path-column", "picture", "--label-column", "species", "--workers", 0]

    done = prep_here("convert", tmp_path / "photos.csv", tmp_path / "out", *words)
    (tmp_path / "out/train/shard-00000.lmdb").unlink()
    again = prep_here(
        *("repair", tmp_path / "out/train", "--source", tmp_path / "photos.csv", "--root", photos),
        *("--workers", 0),
    )

    assert "2 images, 2 classes" in done.stdout
    assert "intact: 2 images" in again.stdout


def test_links_are_followed_on_request(photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "subset/bird/1.png", encoded(pixels(8, 8), ".png"))
    (tmp_path / "subset/dog").symlink_to(photos / "dog")
    words = ["convert", tmp_path / "subset", tmp_path / "out", "--workers", 0]

    refused = prep_here(*words)
    followed = prep_here(*words, "--follow-symlinks")

    assert refused.returncode == 1
    assert "--follow-symlinks" in refused.stderr
    assert "6 images, 2 classes" in followed.stdout


def test_a_dry_run_says_problems_sizes_and_time_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    (photos / "bird").mkdir()
    words = ["convert", photos, tmp_path / "out", "--dry-run", "--workers", 0]

    failing = prep_here(*words)
    (photos / "bird").rmdir()
    fine = prep_here(*words)

    assert failing.returncode == 1
    assert "bird: this class has no image" in failing.stdout
    assert failing.stdout.endswith("dry run: the conversion would fail: 1 problem; nothing was written\n")
    assert fine.returncode == 0
    assert "10 images, 2 classes" in fine.stdout
    assert "time: about 1 s with 1 process: reading at " in fine.stdout
    assert fine.stdout.endswith("dry run: no problems; nothing was written\n")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_as_json_is_one_object_with_the_exit_code_of_the_conversion(
    photos: Path, tmp_path: Path
) -> None:
    write(photos / "cat/bad.png", b"no image")
    words = ["convert", photos, tmp_path / "out", "--workers", 0]

    done = prep_here(*words, "--dry-run", "--json")

    value = json.loads(done.stdout)
    assert done.returncode == prep_here(*words).returncode == 1
    assert [split["images"] for split in value["splits"]] == [11]
    assert [(one["count"], one["exit_code"]) for one in value["problems"]] == [(1, 1)]
    assert value["seconds"] > 0
