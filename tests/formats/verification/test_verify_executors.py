"""Verification and repair on an executor that the caller gave: what they find, and what they refuse."""

import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import repair, verify
from shardprep.formats.runtime.jobs import OtherMachine
from shardprep.formats.shards.read import ARCHIVE_NAME, IN_PLACE
from shardprep.formats.verification import verify as verification
from shardprep.formats.verification.verify import LEVELS
from support.datasets import converted, flip, tree
from support.engines import Engine, elsewhere, finish, moved


@pytest.fixture
def dataset(archives: Path, tmp_path: Path) -> Path:
    converted(archives, tmp_path / "out", shard_size=110_000)
    return tmp_path / "out"


def damage(dataset: Path) -> None:
    """Damage it in several ways; at least one shard stays intact."""
    shards = sorted(dataset.glob("shard-*"))
    assert len(shards) > 5
    shards[0].unlink()
    flip(shards[1])
    shards[3].write_bytes(bytes(shards[3].stat().st_size))
    flip(shards[4], 40)


@pytest.mark.torture
def test_a_daemonic_worker_such_as_dasks_reads_records(dataset: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as found:
        assert found.apply(_exit_code, (dataset,)) == 0


def _exit_code(dataset: Path) -> int:
    with ThreadPoolExecutor(1) as threads:
        return verify(dataset, level="decode", executor=threads).exit_code


def refused(path: Path, machine: Engine, match: str) -> None:
    """Check that another machine is refused at each level that asks it."""
    for level in LEVELS[1:]:
        with pytest.raises(OtherMachine, match=f"machine {socket.gethostname()} {match}"):
            verify(path, level=level, executor=machine, workers=1)


def test_a_machine_that_sees_no_such_dataset_or_another_is_refused_by_its_name(
    dataset: Path, archives: Path, tmp_path: Path
) -> None:
    aside, other = tmp_path / "aside", tmp_path / "other"
    converted(archives, other, shard_size=110_000, seed=1)
    lacking = shutil.copytree(dataset, tmp_path / "lacking")
    next(lacking.glob("shard-00000*")).unlink()

    refused(dataset, moved((dataset, aside)), "does not see the dataset")
    for there, why in ((other, "its root differs"), (lacking, "No such file")):
        refused(dataset, moved((dataset, aside), (there, dataset)), f"does not see the dataset .*{why}")


def test_a_machine_that_sees_no_archive_or_another_is_refused_by_name(archives: Path, tmp_path: Path) -> None:
    converted(archives, dataset := tmp_path / "indexed", split="val", container=IN_PLACE, order="archive")
    other, link = tmp_path / "other", dataset / ARCHIVE_NAME
    other.write_bytes(b"another")

    for moves, why in ((), "No such file"), (((other, link),), "archive.tar has another size"):
        refused(dataset, moved((link, tmp_path / "aside"), *moves), f"does not see the dataset .*{why}")


def test_a_machine_with_another_version_is_refused_and_repairs_nothing(dataset: Path, archives: Path) -> None:
    damage(dataset)
    before = tree(dataset)
    with pytest.MonkeyPatch.context() as patch:

        def change() -> None:
            patch.setattr(verification, "version", lambda package: "99")

        machine = elsewhere(change, patch.undo)
        refused(dataset, machine, "has shardprep 99, but the verification was begun with")
        with pytest.raises(OtherMachine, match="shardprep 99"):
            repair(dataset, archives, executor=machine)
    assert tree(dataset) == before


def test_a_file_that_is_there_and_cannot_be_read_is_unchecked_as_on_this_machine(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, *given: Any, **options: Any) -> int:
        if str(path).endswith("shard-00001.lmdb"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *given, **options)

    monkeypatch.setattr(os, "open", refusing)
    here, there = (verify(dataset, executor=each) for each in (None, Engine(finish)))

    assert here.exit_code == 3
    assert there.to_json() == here.to_json()


@pytest.mark.slow
def test_an_executor_repairs_to_the_same_bytes(dataset: Path, archives: Path) -> None:
    before = tree(dataset)
    damage(dataset)
    (dataset / "index.npy").unlink()
    used: list[Executor] = []

    def run(future: Future[Any], call: Callable[[], Any]) -> None:
        used.append(engine)
        finish(future, call)

    engine = Engine(run)
    report = repair(dataset, archives, executor=engine)

    shards = len([*dataset.glob("shard-*")])
    assert (report.exit_code, tree(dataset)) == (0, before)
    assert len(report.rebuilt) == 5
    assert len(used) > 2 * shards
