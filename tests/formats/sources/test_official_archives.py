import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    ConvertOptions,
    convert,
    convert_part,
    fetch,
    join,
    publish,
    repair,
)
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.tar import OFFICIAL_FILES, OfficialFile, archive_of, check_md5
from support.datasets import prep_here
from support.source_builders import DEVKIT, TRAIN, VAL, Miniature


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature with archives that are made the official ones for the test, by size."""
    return made_official(Miniature().write_tars(tmp_path), monkeypatch)


def made_official(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (TRAIN, VAL, DEVKIT):
        data = (folder / name).read_bytes()
        md5 = hashlib.md5(data, usedforsecurity=False)
        size = None if name == DEVKIT else len(data)
        monkeypatch.setitem(OFFICIAL_FILES, name, OfficialFile(size, md5.hexdigest()))
    return folder


def test_an_archive_is_known_by_name_and_size_without_reading_it(tars: Path) -> None:
    archives = recognise(tars).listing("train").archives
    assert [(a.name, a.md5, a.verified) for a in archives] == [(TRAIN, None, "size"), (DEVKIT, None, "no")]


def test_on_request_archives_are_known_by_md5(tars: Path) -> None:
    archives = recognise(tars, check_md5=True).listing("val").archives
    assert [(a.name, a.md5, a.verified) for a in archives] == [
        (name, OFFICIAL_FILES[name].md5, "md5") for name in (VAL, DEVKIT)
    ]


def test_checked_md5s_are_under_the_root_and_stay_there(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = made_official(archives, monkeypatch)
    plain, checked = (
        convert(
            tars, tmp_path / name, split="val", options=ConvertOptions(check_md5=name == "md5"), workers=0
        )[0]
        for name in ("plain", "md5")
    )
    expected = {name: OFFICIAL_FILES[name].md5 for name in (VAL, DEVKIT)}
    manifest = checked.manifest

    assert (plain.manifest.archive_md5, manifest.archive_md5) == ({}, expected)
    assert manifest.root != plain.manifest.root
    assert replace(manifest, source=plain.manifest.source) == plain.manifest
    inspected = prep_here("inspect", checked.path).stdout
    assert f"official MD5  {expected[VAL]} of {VAL}, {expected[DEVKIT]} of" in inspected
    assert convert(tars, checked.path, split="val", workers=0)[0].manifest.root == manifest.root

    (checked.path / manifest.shards[0].name).unlink()
    repair(checked.path, tars, workers=0).raise_for_findings()
    publish(checked.path, (tmp_path / "bucket").as_uri())
    fetch((tmp_path / "bucket").as_uri(), tmp_path / "copy")
    assert read_manifest(tmp_path / "copy") == manifest
    np.save(tmp_path / "scores.npy", np.arange(manifest.records))
    assert join(checked.path, {"score": tmp_path / "scores.npy"}, workers=0).manifest.archive_md5 == expected


def test_parts_do_not_lose_checked_md5s(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = made_official(archives, monkeypatch)
    options = ConvertOptions(check_md5=True)
    convert_part(tars, tmp_path / "out", (1, 1), split="val", options=options, workers=0)

    (done,) = convert(tars, tmp_path / "out", split="val", options=options, workers=0)

    assert done.manifest.archive_md5.keys() == {VAL, DEVKIT}


def test_an_archive_of_another_size_is_not_verified(tars: Path) -> None:
    with (tars / TRAIN).open("ab") as file:
        file.write(bytes(512))
    assert archive_of(tars / TRAIN).verified == "no"


def test_an_official_name_with_another_md5_is_an_error(tars: Path) -> None:
    data = bytearray((tars / TRAIN).read_bytes())
    data[1200] ^= 1
    (tars / TRAIN).write_bytes(data)
    with pytest.raises(SourceDamaged, match=f"has MD5 .*, not {OFFICIAL_FILES[TRAIN].md5}"):
        recognise(tars, check_md5=True).listing("train")


def test_a_file_of_another_name_has_an_md5_that_nothing_confirms(tars: Path) -> None:
    renamed = (tars / TRAIN).rename(tars / "mine.tar")
    archive = check_md5(renamed)
    assert archive.md5 == OFFICIAL_FILES[TRAIN].md5
    assert archive.verified == "no"
