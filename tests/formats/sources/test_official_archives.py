import hashlib
from pathlib import Path

import pytest
from source_builders import DEVKIT, TRAIN, VAL, Miniature

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.archive_md5 import (
    OFFICIAL_FILES,
    OfficialFile,
    archive_of,
    check_md5,
)
from shardprep.formats.sources.recognise import recognise


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature with archives that are made the official ones for the test, by size."""
    folder = Miniature().write_tars(tmp_path)
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


def test_what_was_checked_of_an_archive_is_not_in_the_manifest(tars: Path) -> None:
    quick, careful = (recognise(tars, check_md5=check).listing("val").archives for check in (False, True))
    assert [a.to_json() for a in quick] == [a.to_json() for a in careful]


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
