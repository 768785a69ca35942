"""An unfinished conversion leaves and removes only its own files."""

from pathlib import Path

import pytest

from shardprep.formats import (
    DataError,
    PlanMismatch,
    UsageError,
    repair,
    verify,
)
from support.datasets import converted, prep
from support.sampling import torture_except


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years")
    return folder


def test_a_link_in_place_of_the_work_folder_is_refused_and_never_followed(
    archives: Path, tmp_path: Path, victim: Path
) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset)
    (dataset / ".prep").symlink_to(victim)

    assert [f.file for f in verify(dataset).findings] == [".prep"]
    with pytest.raises((DataError, UsageError)):
        converted(archives, dataset)
    sorted(dataset.glob("shard-*"))[0].unlink()
    with pytest.raises(UsageError):
        repair(dataset, archives, workers=0)
    assert (victim / "thesis.txt").read_text() == "three years"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    torture_except(
        ["counters", "lock", "plan.json", "index.npy", "shard-00000.lmdb.tmp"], "lock", "shard-00000.lmdb.tmp"
    ),
)
def test_links_inside_a_work_folder_are_never_written_through(
    archives: Path, tmp_path: Path, victim: Path, name: str
) -> None:
    work_folder = tmp_path / "out" / ".prep"
    work_folder.mkdir(parents=True)
    (work_folder / name).symlink_to(victim / "thesis.txt")

    prep("convert", archives, tmp_path / "out", "--split", "train", "--restart")

    assert (victim / "thesis.txt").read_text() == "three years"


def test_an_unreadable_plan_says_what_to_do(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".prep").mkdir(parents=True)
    (tmp_path / "out" / ".prep" / "plan.json").write_text("{")

    with pytest.raises(PlanMismatch, match="--restart"):
        converted(archives, tmp_path / "out")
