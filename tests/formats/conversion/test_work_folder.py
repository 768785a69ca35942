"""An unfinished conversion leaves and removes only its own files."""

import shutil
from pathlib import Path

import pytest

from shardprep.formats import (
    ConvertOptions,
    CorruptRecord,
    DataError,
    PlanMismatch,
    UsageError,
    convert,
    open_dataset,
    repair,
    verify,
)
from support.datasets import converted, prep, writable
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


def test_checking_md5_changes_nothing(archives: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.tar"
    shutil.copy(archives / "ILSVRC2012_img_train.tar", source)
    options = [ConvertOptions(allow_partial=True, check_md5=check) for check in (False, True)]

    roots = {
        convert(source, tmp_path / str(n), split="train", options=o, workers=0)[0].manifest.root
        for n, o in enumerate(options)
    }

    assert len(roots) == 1


def test_a_swapped_shard_is_noticed_when_it_is_read(archives: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    converted(archives, dataset, shard_size=1)
    sizes: dict[int, list[Path]] = {}
    for shard in sorted(dataset.glob("shard-*")):
        sizes.setdefault(shard.stat().st_size, []).append(shard)
    first, second = next(s for s in sizes.values() if len(s) > 1)[:2]
    data = first.read_bytes()
    writable(first).write_bytes(second.read_bytes())
    writable(second).write_bytes(data)

    with open_dataset(dataset) as ds, pytest.raises(CorruptRecord, match="does not match"):
        for _ in ds:
            pass
