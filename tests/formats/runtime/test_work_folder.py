"""A run leaves and removes only its own files, in a folder of its own that goes with it."""

import shutil
import sys
from pathlib import Path

import pytest

from shardprep.formats import PlanOptions, convert, repair, verify
from shardprep.formats.errors import DataError, PlanMismatch, UsageError, WorkerDied
from shardprep.formats.runtime import work_folder
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.sources.recognise import recognise
from support.datasets import converted, open_files, prep
from support.sampling import torture_except
from support.workers import PoisonedReader

NAMES = ["counters", "lock", "plan.json", "index.npy", "shard-00000.lmdb.tmp"]


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
@pytest.mark.parametrize("name", torture_except(NAMES, "lock", "shard-00000.lmdb.tmp"))
def test_links_inside_a_work_folder_are_never_written_through(
    archives: Path, tmp_path: Path, victim: Path, name: str
) -> None:
    work_folder = tmp_path / "out" / ".prep"
    work_folder.mkdir(parents=True)
    (work_folder / name).symlink_to(victim / "thesis.txt")

    prep("convert", archives, tmp_path / "out", "--split", "train", "--restart")

    assert (victim / "thesis.txt").read_text() == "three years"


@pytest.mark.parametrize("plan", ["{", "3\n"])
def test_an_unreadable_or_older_plan_says_what_to_do(plan: str, archives: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".prep").mkdir(parents=True)
    (tmp_path / "out" / ".prep" / "plan.json").write_text(plan)

    with pytest.raises(PlanMismatch, match="--restart"):
        converted(archives, tmp_path / "out")
    (tmp_path / "out" / ".prep" / "plan.json").write_text('{"writer":"0.3"}\n')
    with pytest.raises(PlanMismatch, match=r"writer was 0\.3, is now 0\.4; use the versions it was"):
        work_folder.refuse_other_plan(tmp_path / "out", {"writer": "0.4"})


def test_folders_of_dead_runs_are_removed_and_links_of_such_names_are_not_followed(
    tmp_path: Path, victim: Path
) -> None:
    place = tmp_path / "out" / ".prep"
    shutil.copytree(victim, place / "run-that-is-dead")
    (place / "run-that-is-a-link").symlink_to(victim)
    (place / "run-that-is-a-file").write_text("")

    with WorkFolder(tmp_path / "out") as work_folder:
        assert {path.name for path in place.iterdir()} == {"lock", work_folder.run.name}

    assert {path.name for path in place.iterdir()} == {"lock"}
    assert (victim / "thesis.txt").read_text() == "three years"


def test_a_new_output_and_every_new_folder_above_it_are_flushed_and_a_run_is_closed_before_its_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, opened = list[Path](), list[int]()
    monkeypatch.setattr(work_folder, "flush_file", flushed.append)
    monkeypatch.setattr(work_folder, "remove_run_folder", lambda run: opened.append(open_files(run)))
    with WorkFolder(new := tmp_path / "a" / "b" / "out", shared=True):
        assert {new, *new.parents[:3]} <= {*flushed}
    assert opened == [0]  # FUSE would keep an open file in the folder, under another name


def test_a_run_that_another_one_overtook_finds_it_complete(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, options = sys.modules["shardprep.formats.conversion.prepare"], PlanOptions(shard_size=60_000)
    real = module.WorkFolder

    def about_to_lock(output: Path, *, shared: bool) -> WorkFolder:
        monkeypatch.undo()
        converted(archives, tmp_path / "out")
        return real(output, shared=shared)

    monkeypatch.setattr(module, "WorkFolder", about_to_lock)

    (done,) = convert(archives, tmp_path / "out", split="train", plan_options=options, workers=0)

    assert done.already_complete
    assert not (tmp_path / "out" / ".prep").exists()


@pytest.mark.slow
def test_an_image_that_kills_its_worker_is_named(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = recognise(archives).listing("train").entries["key"]
    poison = keys[len(keys) // 2].decode()
    monkeypatch.setenv("POISON", poison)
    monkeypatch.setattr("shardprep.formats.sources.ilsvrc.TarReader", PoisonedReader)

    with pytest.raises(WorkerDied) as caught:
        converted(archives, tmp_path / "out", shard_size=90_000, workers=2)

    assert caught.value.key == poison
