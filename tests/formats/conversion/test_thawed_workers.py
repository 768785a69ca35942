"""A worker that outlives its run publishes nothing, wherever it stopped and whenever it goes on."""

from pathlib import Path

import pytest

from shardprep.formats import verify
from support.datasets import prep, tree
from support.freezing import Freezing
from support.sampling import sampled, torture_except

NEXT = range(1, 20, 3)  # where the next run's worker stops
FEWEST = 15  # operations on files that it takes to make a shard and its commit record


def arguments(archives: Path, output: Path, container: str) -> list[object]:
    words = ["--split", "val", "--format", container, "--shard-size", 500_000, "--quiet"]
    return ["convert", archives, output, *words]


@pytest.fixture(scope="module", params=torture_except(["lmdb", "hdf5"], "lmdb"))
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(archives: Path, tmp_path_factory: pytest.TempPathFactory, container: str) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    prep(*arguments(archives, output, container), "--workers", 0, check=True)
    return output


def assert_same(output: Path, whole: Path) -> None:
    assert verify(output, level="records").findings == []
    assert tree(output) == tree(whole)


def thaw(archives: Path, whole: Path, folder: Path, old: int | str, new: int | str) -> tuple[bool, bool]:
    """Stop a run's worker at ``old``, kill its parent, stop the next one's at ``new``, continue the first.

    Returns whether there were such moments.
    """
    folder.mkdir()
    output = folder / "out"
    command = arguments(
        archives, output, next(whole.glob("shard-*")).suffix.replace(".h5", "hdf5").strip(".")
    )
    with Freezing(folder / "old", output, old, command) as dead:
        if not dead.stopped():
            return False, False
        dead.kill_parent()
        with Freezing(folder / "new", output, new, command) as alive:
            has_stopped = alive.stopped()
            dead.thaw()
            dead.await_worker()
            if has_stopped:
                alive.thaw()
            said = alive.said()
            assert alive.process.returncode == 0, said
        assert dead.said() == ""
    assert_same(output, whole)
    return True, has_stopped


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), torture_except([("records", "records"), (1, 3), (4, 12)], (4, 12)))
def test_a_worker_that_goes_on_in_the_next_run_changes_nothing(
    archives: Path, whole: Path, tmp_path: Path, old: int | str, new: int | str
) -> None:
    assert thaw(archives, whole, tmp_path / "case", old, new) == (True, True)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_worker_that_goes_on_at_any_moment_of_the_next_run_changes_nothing(
    archives: Path, whole: Path, tmp_path: Path
) -> None:
    last = 0
    while thaw(archives, whole, tmp_path / f"{last}", last + 1, "records")[0]:
        last += 1
    assert last >= FEWEST
    for old, new in sampled([(old, new) for old in range(1, last + 1) for new in NEXT], 6):
        assert thaw(archives, whole, tmp_path / f"{old}-{new}", old, new)[0]


@pytest.mark.torture
def test_a_worker_of_a_dead_part_that_goes_on_beside_another_part_changes_nothing(
    archives: Path, whole: Path, tmp_path: Path, container: str
) -> None:
    output = tmp_path / "out"
    command = arguments(archives, output, container)
    part = [*command, "--part", "1/1"]
    with Freezing(tmp_path / "old", output, "records", part) as dead:
        assert dead.stopped()
        dead.kill_parent()
        with Freezing(tmp_path / "new", output, "records", part) as alive:
            assert alive.stopped()
            dead.thaw()
            dead.await_worker()
            alive.thaw()
            said = alive.said()
            assert alive.process.returncode == 0, said
    assert [*(output / ".prep").glob("run-*")] == []
    prep(*command, check=True)
    assert_same(output, whole)
