"""A read that stops short is no end of a file."""

import shutil
from pathlib import Path

import pytest

from support.datasets import converted, prep, tree, unpack
from support.sampling import torture_except
from support.short_reads import cut_below


def folders(archives: Path, root: Path) -> Path:
    unpack(archives, root)
    shutil.copy(archives / "ILSVRC2012_devkit_t12.tar.gz", root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "container"), torture_except([("tars", "lmdb"), ("folders", "hdf5")], ("tars", "lmdb"))
)
def test_a_source_that_gives_ten_bytes_at_a_time_is_converted_to_the_same_bytes(
    archives: Path, tmp_path: Path, layout: str, container: str
) -> None:
    source = archives if layout == "tars" else folders(archives, tmp_path / "source")
    environment = cut_below(source, tmp_path / "short_reads.so")
    words = ["convert", source, tmp_path / "out", "--split", "val", "--format", container]

    done = prep(*words, "--shard-size", 60_000, "--workers", 0, "--quiet", env=environment)

    assert (done.returncode, done.stderr) == (0, "")
    converted(source, tmp_path / "whole", split="val", container=container)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("container", torture_except(["lmdb", "hdf5"], "lmdb"))
def test_an_output_that_gives_ten_bytes_at_a_time_is_the_same(
    archives: Path, tmp_path: Path, container: str
) -> None:
    environment = cut_below(tmp_path / "out", tmp_path / "short_reads.so")
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--format", container, "--workers", 0]

    done = prep(*words, "--shard-size", 60_000, "--quiet", env=environment)

    assert (done.returncode, done.stderr) == (0, "")
    converted(archives, tmp_path / "whole", split="val", container=container)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
