"""A repair from a copy in a bucket brings back the damaged files, and touches nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from shardprep.formats import PlanMismatch, ShardprepError, UsageError, fetch, publish, repair
from shardprep.formats.storage.store import RemoteDenied, RetryPolicy
from shardprep.formats.storage.transfer import RemoteDamaged
from shardprep.formats.transfer import repair as refetching
from support.datasets import flip, prep_here, tree
from support.faulty_proxy import HIDDEN, Proxy
from support.sampling import torture_except

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


@pytest.mark.parametrize("of_splits", torture_except([False, True], True))
def test_the_damaged_files_are_fetched_and_no_others(
    copy: Path, local: Path, url: str, proxy: Proxy, of_splits: bool
) -> None:
    before = {path.name: path.stat().st_ino for path in (copy / "train").iterdir()}
    asked = len(proxy.asked)

    report = repair(copy / "train", url if of_splits else f"{url}/train")

    assert report.rebuilt == (SHARD, "shard-00002.h5")
    assert [finding.file for finding in report.findings] == ["mine.txt"]
    assert tree(copy / "train").items() >= tree(local / "train").items()
    after = {path.name: path.stat().st_ino for path in (copy / "train").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {SHARD}
    fetched = {path.rpartition("/")[2] for path, _ in proxy.asked[asked:]}
    assert {name for name in fetched if name.startswith(("shard", "index"))} == {SHARD, "shard-00002.h5"}
    assert not (copy / "train/.prep").exists()


@pytest.mark.parametrize(
    ("fault", "error"),
    torture_except([("flip", RemoteDamaged), ("403", RemoteDenied)], ("403", RemoteDenied)),
)
def test_a_copy_that_is_not_right_replaces_nothing(
    copy: Path, url: str, proxy: Proxy, fault: str, error: type[ShardprepError]
) -> None:
    before = tree(copy / "train")
    proxy.fault = lambda path, count: fault if path.endswith(SHARD) else None

    with pytest.raises(error) as caught:
        repair(copy / "train", f"{url}/train")

    assert HIDDEN not in str(caught.value)
    after = tree(copy / "train")
    assert after[SHARD] == before[SHARD]
    proxy.fault = lambda path, count: None
    assert repair(copy / "train", f"{url}/train").rebuilt


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
