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
