"""Commands over a folder of splits."""

import json
import shutil
from pathlib import Path

import pytest

from shardprep import DataError, verify
from support.datasets import flip, prep_here, tree
from support.source_builders import write


@pytest.fixture
def shards(splits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(splits, tmp_path / "shards"))


def test_verify_checks_each_split_and_sums_up(splits: Path) -> None:
    done = prep_here("verify", splits)
    found = json.loads(prep_here("verify", splits, "--json").stdout)

    names = [f"{splits}/{split}" for split in ("train", "val", "test")]
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines() if ": intact:" in line] == names
    assert done.stdout.splitlines()[-1].startswith(f"{splits}: train, val, test: ")
    assert done.stdout.splitlines()[-1].endswith("all intact")
    assert prep_here("verify", splits, "--level", "quick").stdout.endswith("all complete\n")
    assert (found["folder"], found["ok"], found["exit_code"]) == (str(splits), True, 0)
    assert [split["dataset"] for split in found["splits"]] == names
    assert all(split["root"].startswith("sha256:") for split in found["splits"])


def test_one_damaged_or_unfinished_split_is_named_and_decides_the_exit_code(shards: Path) -> None:
    flip(shards / "val/shard-00000.lmdb")
    damaged = prep_here("verify", shards)
    (shards / "val" / "manifest.json").unlink()
    unfinished = prep_here("verify", shards)

    assert (damaged.returncode, unfinished.returncode) == (1, 1)
    assert f"{shards}/train: intact" in damaged.stdout
    assert f"{shards}/test: intact" in damaged.stdout
    assert damaged.stdout.splitlines()[-1] == f"{shards}: NOT intact: val (1 of 3)"
    assert "no manifest.json" in unfinished.stdout


def test_inspect_sums_up_each_split_and_an_error_in_one_does_not_hide_the_others(shards: Path) -> None:
    write(shards / "lost+found/manifest.json", b"")  # at the top of a disk
    whole = prep_here("inspect", shards)
    (shards / "train" / "manifest.json").unlink()
    text = prep_here("inspect", shards)
    found = json.loads(prep_here("inspect", shards, "--json").stdout)

    assert whole.returncode == 0
    assert whole.stdout.count("content_root") == 3
    assert whole.stdout.splitlines()[-1].startswith(f"{shards}: train, val, test: ")
    assert text.returncode == found["exit_code"] == 1
    assert f"{shards}/val: val split" in text.stdout
    assert text.stdout.splitlines()[-1].endswith("train failed")
    assert text.stderr.startswith(f"prep: {shards}/train: no manifest.json")
    assert found["splits"][0]["error"]["kind"] == "ManifestDamaged"
    assert [split["ok"] for split in found["splits"]] == [False, True, True]
    paths = [f"{shards}/{name}" for name in ("train", "val", "test")]
    assert [split["path"] for split in found["splits"]] == paths


@pytest.mark.slow
def test_repair_mends_each_split(shards: Path, splits: Path, archives: Path) -> None:
    for split in ("train", "test"):
        flip(shards / split / "shard-00000.lmdb")

    done = prep_here("repair", shards, "--source", archives, "--workers", 0)

    assert done.returncode == 0
    assert done.stdout.count("rebuilt: ") == done.stdout.count("rebuilt: shard-00000.lmdb") == 2
    assert f"{shards}/val: nothing to rebuild" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{shards}: 2 files rebuilt; ")
    assert tree(shards) == tree(splits)


@pytest.mark.slow
def test_bench_loader_measures_each_split(splits: Path) -> None:
    words = ["bench-loader", splits, "--workers", 0, "--seconds", 0.05, "--batch-size", 2]

    text = prep_here(*words)
    found = json.loads(prep_here(*words, "--json").stdout)

    assert text.stdout.splitlines()[-1].startswith(f"{splits}: train ")
    assert text.stdout.splitlines()[-1].count("images/s") == 3
    assert [Path(split["dataset"]).name for split in found["splits"]] == ["train", "val", "test"]


def test_what_is_of_one_split_is_refused_for_several(splits: Path, tmp_path: Path) -> None:
    for command, option in (("bench-loader", "--trace"), ("gate", "--root"), ("report", "--record")):
        done = prep_here(command, splits, option, tmp_path / "x")
        assert (done.returncode, "is a folder of splits; " in done.stderr) == (2, True)
    done = prep_here("verify", splits.as_uri())
    assert (done.returncode, done.stdout, done.stderr.count("is a URL: give a folder")) == (2, "", 1)


def test_a_dataset_that_has_folders_is_one_dataset(splits: Path, shards: Path) -> None:
    shutil.copytree(splits / "val", shards / "train" / "val")

    done = prep_here("verify", shards / "train")

    assert done.returncode == 1
    stray = "val: does not belong to the dataset"
    assert f"damaged: {stray}" in done.stdout
    with pytest.raises(DataError, match=f"{stray}$"):
        verify(shards / "train").raise_for_findings()
    assert prep_here("inspect", shards / "train").stdout.startswith(f"{shards}/train: train split")
