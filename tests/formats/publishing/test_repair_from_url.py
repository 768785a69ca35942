"""A repair from a copy in a bucket brings back the damaged files, and touches nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from shardprep.formats import PlanMismatch, UsageError, fetch, publish, repair
from shardprep.formats.storage.store import RetryPolicy
from shardprep.formats.transfer import repair as refetching
from support.datasets import flip, prep_here, tree
from support.faulty_proxy import Proxy

SHARD = "shard-00001.h5"


@pytest.fixture
def copy(local: Path, url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the splits, of which the bucket has another; train lacks a shard and has a damaged one."""
    monkeypatch.setattr(refetching, "PATIENT", RetryPolicy(retries=1, timeout_s=30.0))
    publish(local, url)
    folder = Path(shutil.copytree(local, tmp_path / "copy"))
    flip(folder / "train" / SHARD, 5000)
    (folder / "train/shard-00002.h5").unlink()
    (folder / "train/mine.txt").write_text("mine")
    return folder


def test_a_copy_of_another_dataset_is_refused(copy: Path, url: str) -> None:
    before = tree(copy)

    with pytest.raises(PlanMismatch, match="no copy of this dataset"):
        repair(copy / "train", f"{url}/val")
    with pytest.raises(UsageError, match="is the URL of a copy"):
        repair(copy / "train", f"{url}/train", root=copy)

    assert tree(copy) == before


@pytest.mark.torture
def test_the_command_repairs_each_split_of_a_folder(
    copy: Path, local: Path, url: str, tmp_path: Path
) -> None:
    (copy / "train/mine.txt").unlink()

    done = prep_here("repair", copy, "--source", url, "--json", "--quiet")

    assert done.returncode == 0, done.stderr
    rebuilt = {split["dataset"][-5:]: split["rebuilt"] for split in json.loads(done.stdout)["splits"]}
    assert rebuilt["train"] == [SHARD, "shard-00002.h5"]
    assert tree(copy) == tree(local)
    fetch(url, tmp_path / "again")
    assert tree(tmp_path / "again") == tree(local)
