"""A run builds its files in a separate folder, which is removed with it."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import BadImage, PlanOptions, convert, verify
from shardprep.formats.runtime.work_folder import WorkFolder
from support.datasets import converted


class Holding(ThreadPoolExecutor):
    """An executor that fails the second job at once, and holds the first in the middle until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(2)
        self.jobs: list[Future[Any]] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        real = sys.modules["shardprep.formats.conversion.shard"]._write  # type: ignore[attr-defined]

        def write(job: Any, built: Path) -> Any:
            if job.shard.number == 0:
                written = real(job, built)
                self.has_begun.set()
                self.may_go_on.wait(30)
                return written
            self.has_begun.wait(30)
            raise BadImage("is none")

        monkeypatch.setattr("shardprep.formats.conversion.shard._write", write)

    def submit(self, *call: Any, **given: Any) -> Future[Any]:
        self.jobs.append(super().submit(*call, **given))
        return self.jobs[-1]


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    with Holding(monkeypatch) as executor:
        yield executor
        executor.may_go_on.set()


def test_a_job_that_goes_on_in_an_executor_after_its_run_has_failed_publishes_nothing(
    archives: Path, tmp_path: Path, holding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PlanOptions(shard_size=60_000)
    with pytest.raises(BadImage):
        convert(archives, tmp_path / "out", split="train", plan_options=options, executor=holding)
    monkeypatch.undo()
    converted(archives, tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}

    holding.may_go_on.set()

    assert isinstance(holding.jobs[0].result(30), FileNotFoundError)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before
    assert verify(tmp_path / "out").findings == []


def test_folders_of_dead_runs_are_removed_and_links_of_such_names_are_not_followed(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "out" / ".prep"
    for folder in (victim, place / "run-that-is-dead"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("three years")
    (place / "run-that-is-a-link").symlink_to(victim)
    (place / "run-that-is-a-file").write_text("")

    with WorkFolder(tmp_path / "out") as work_folder:
        assert {path.name for path in place.iterdir()} == {"lock", work_folder.run.name}

    assert {path.name for path in place.iterdir()} == {"lock"}
    assert (victim / "file").read_text() == "three years"


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch, archives: Path, tmp_path: Path) -> None:
    """Another run begins and finishes when a conversion into ``tmp_path / "out"`` is about to lock it."""
    module = sys.modules["shardprep.formats.conversion.convert"]
    real = module.WorkFolder

    def work_folder(output: Path) -> WorkFolder:
        monkeypatch.undo()
        converted(archives, tmp_path / "out")
        return real(output)

    monkeypatch.setattr(module, "WorkFolder", work_folder)


@pytest.mark.usefixtures("overtaken")
def test_a_run_that_another_one_overtook_finds_it_complete(archives: Path, tmp_path: Path) -> None:
    options = PlanOptions(shard_size=60_000)

    (done,) = convert(archives, tmp_path / "out", split="train", plan_options=options, workers=0)

    assert done.already_complete
    assert not (tmp_path / "out" / ".prep").exists()
