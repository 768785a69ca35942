"""``prep index``, and what other commands say about its datasets."""

from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from support.datasets import flip, prep, prep_here

VAL = "ILSVRC2012_img_val.tar"


def test_the_commands_say_where_the_images_are_and_what_to_do(own: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    made = prep_here("index", own, output, "--split", "val", "--workers", 0, "--quiet")
    seen = prep_here("inspect", output)
    flip(own / VAL)
    found = prep_here("verify", output)
    mended = prep_here("repair", output, "--source", own)

    assert "in place, 1 table" in made.stdout
    assert f"in place in {own / VAL}" in seen.stdout
    assert "in the order of the archive" in seen.stdout
    assert (found.returncode, mended.returncode) == (1, 1)
    assert "run prep index again" in found.stdout
    assert "no archive" in mended.stderr


@pytest.mark.torture
def test_a_damaged_table_is_mended_by_the_command_that_verify_names(own: Path, tmp_path: Path) -> None:
    prep("index", own, "out", "--split", "val", "--quiet", cwd=tmp_path, check=True)
    root = read_manifest(tmp_path / "out").root
    flip(tmp_path / "out" / "shard-00000.tar.npy", 300)

    found = prep_here("verify", "out", cwd=tmp_path)
    mended = prep_here("repair", "out", "--source", "archives", cwd=tmp_path)

    assert found.stdout.splitlines()[-1] == "next: prep repair out --source SOURCE"
    assert mended.returncode == 0
    assert read_manifest(tmp_path / "out").root == root
