"""A disk's profile: its derived values, and that files with missing or changed parts are refused."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import pytest

from shardprep.cli.commands.bench import sentence
from shardprep.formats import DataError, UnknownVersion, UsageError
from shardprep.loaders.measuring.disk import DiskProfile, Missing, Reads
from shardprep.loaders.measuring.disk_chart import bars, picture, save_picture, terminal_lines
from support.disk_profiles import full_profile, rate


def nothing_cold(profile: DiskProfile) -> DiskProfile:
    return replace(
        profile, stream=Reads(None, rate(4e9)), cold_method=None, missing=Missing("tmpfs", None, None)
    )


def test_without_cold_rates_the_sentence_says_so() -> None:
    said = sentence(nothing_cold(full_profile()))

    assert "40,000 images/s warm (cold could not be measured)" in said
    assert "images/s cold" not in said


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("stream/cold/median", "fast"),
        ("stream/cold/median", 1.0),
        ("stream/cold/low", float("nan")),
        ("stream/cold/repetitions", 0),
        ("stream", None),
        ("random", []),
        ("random/0/queue_depth", True),
        ("sequential", "much"),
        ("images_per_second/cold", 9000.0),
        ("record_bytes", 0),
        ("missing", {}),
        ("extra", 1),
        ("remarks", [1]),
        ("writing", []),
        ("small_files", ...),  # left out
    ],
)
def test_a_damaged_profile_is_refused(place: str, value: object, tmp_path: Path) -> None:
    whole = full_profile().to_json()
    *above, last = place.split("/")
    part: Any = whole
    for name in above:
        part = part[int(name) if name.isdigit() else name]
    part[last] = value
    kept = {name: part for name, part in whole.items() if part is not ...}
    (tmp_path / "disk.json").write_text(json.dumps(kept))

    with pytest.raises(DataError, match=r"disk\.json: is a damaged disk profile"):
        DiskProfile.load(tmp_path / "disk.json")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "other"}', "[" * 100_000, "\ud800", "\x00"]
)
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "disk.json").write_text(text, errors="surrogatepass")

    with pytest.raises(DataError, match="is not a disk profile"):
        DiskProfile.load(tmp_path / "disk.json")


def test_a_later_version_is_another_error() -> None:
    with pytest.raises(UnknownVersion, match="profile version 2"):
        DiskProfile.from_json(full_profile().to_json() | {"version": 2})


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    full_profile().save(tmp_path / "disk.json")
    old = (tmp_path / "disk.json").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            full_profile().save(tmp_path / "disk.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]
    assert (tmp_path / "disk.json").read_bytes() == old


def test_the_bars_are_drawn_in_proportion(tmp_path: Path) -> None:
    profile = full_profile()
    rows = bars(profile)

    lines = terminal_lines(rows, width=40, mark="#")
    save_picture(profile, tmp_path / "disk.png")
    image = cv2.imread(str(tmp_path / "disk.png"))

    assert len(lines) == len(rows) == 12
    assert lines[0].count("#") == 40
    assert lines[3].count("#") == 10  # 50 of 200 MB/s
    assert (image == picture(profile)).all()
    assert len(terminal_lines(bars(nothing_cold(profile)))) == 11
    with pytest.raises(UsageError, match=r"ends in \.png"):
        save_picture(profile, tmp_path / "disk.jpg")
