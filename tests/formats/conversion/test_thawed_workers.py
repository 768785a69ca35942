"""A worker that outlives its run publishes nothing, wherever it stopped and whenever it goes on."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from shardprep.formats import verify
from support.datasets import prep, tree
from support.process_table import text_of
from support.sampling import sampled, torture_except
from support.scripts import piped
from support.waiting import until

TIMEOUT_S = 120.0

# Run in each worker before anything else. It stops the first one at its ``at``-th operation on a file of the
# output (before that), or in the middle of its records; when it continues, only its own end ends it.
SITE = """
import os, signal, sys, time
output, marker, at = os.environ["FREEZE_OUTPUT"], os.environ["FREEZE_MARKER"], os.environ["FREEZE_AT"]
NAMES = ("open", "os.rename", "os.remove", "os.chmod", "os.mkdir", "os.rmdir")
seen = 0

def stop():
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with open(marker, "w") as file:
        file.write(str(os.getpid()))
    os._exit = lambda code: time.sleep(3600)  # the thread that looks at the parent gets no time
    os.kill(os.getpid(), signal.SIGSTOP)

def look(event, args):
    global seen
    if event in NAMES and isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]).startswith(output):
        seen += 1
        if str(seen) == at:
            stop()

def stop_among_records():
    from shardprep.formats.shards import hdf5 as hdf5_shard, lmdb as lmdb_shard
    for writer in (hdf5_shard.Hdf5ShardWriter, lmdb_shard.LmdbShardWriter):
        def append(self, *stored, real=writer.append):
            real(self, *stored)
            stop()
        writer.append = append

if "spawn_main" in " ".join(sys.orig_argv):
    sys.addaudithook(look)
    if at == "records":
        stop_among_records()
"""


class Freezing:
    """A ``prep`` process with one worker, which stops at a moment; both have ended after the context."""

    def __init__(self, folder: Path, output: Path, at: int | str, words: list[object]) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITE)
        self._marker = folder / "marker"
        given = {"OUTPUT": f"{output}", "MARKER": f"{self._marker}", "AT": f"{at}"}
        variables = {f"FREEZE_{name}": value for name, value in given.items()}
        command, variables["PYTHONPATH"] = ("-m", "shardprep", *words, "--workers", 1), str(folder)
        self.process = piped(*command, **variables)

    def __enter__(self) -> Self:
        return self

    def stopped(self) -> bool:
        """Wait until the worker has stopped; False where all work is done before that."""
        until(lambda: self.pid() or self.process.poll() is not None)
        if self.pid():
            until(lambda: state_of(self.pid()) == "T")
        return bool(self.pid())

    def pid(self) -> int:
        return int(text_of(self._marker) or 0) if self._marker.exists() else 0

    def thaw(self) -> None:
        os.kill(self.pid(), signal.SIGCONT)

    def said(self) -> str:
        """The stdout and stderr of all processes; waits for their end."""
        return "".join(self.process.communicate(timeout=TIMEOUT_S))

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process; empty where there is none."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].strip()[:1]


def arguments(archives: Path, output: Path, container: str) -> list[object]:
    words = ["--split", "val", "--format", container, "--shard-size", 500_000, "--quiet"]
    return ["convert", archives, output, *words]


@pytest.fixture(scope="module", params=torture_except(["lmdb", "hdf5"], "lmdb"))
def whole(request: pytest.FixtureRequest, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    prep(*arguments(archives, output, request.param), "--workers", 0, check=True)
    return output


def thaw(
    archives: Path, whole: Path, folder: Path, old: int | str, new: int | str, *part: str
) -> tuple[bool, bool]:
    """Stop a run's worker at ``old``, kill its parent, stop the next one's at ``new``, continue the first.

    The runs are those of ``part``, if that is given. Returns whether there were such moments.
    """
    folder.mkdir()
    output = folder / "out"
    command = arguments(archives, output, "hdf5" if [*whole.glob("shard-*.h5")] else "lmdb")
    with Freezing(folder / "old", output, old, [*command, *part]) as dead:
        if not dead.stopped():
            return False, False
        dead.process.kill()
        dead.process.wait(TIMEOUT_S)
        with Freezing(folder / "new", output, new, [*command, *part]) as alive:
            has_stopped = alive.stopped()
            dead.thaw()
            until(lambda: state_of(dead.pid()) in ("", "Z", "X"))
            if has_stopped:
                alive.thaw()
            said = alive.said()
            assert alive.process.returncode == 0, said
        assert dead.said() == ""
    if part:
        assert [*(output / ".prep").glob("run-*")] == []
        prep(*command, check=True)
    assert verify(output, level="records").findings == []
    assert tree(output) == tree(whole)
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
    while thaw(archives, whole, tmp_path / f"{last}", last + 2, "records")[0]:
        last += 2  # each other moment, as there are many
    assert last >= 14  # operations on files that a shard and its commit record take
    for old, new in sampled([(old, new) for old in range(1, last + 1) for new in range(1, 20, 3)], 4):
        assert thaw(archives, whole, tmp_path / f"{old}-{new}", old, new)[0]


@pytest.mark.torture
def test_a_worker_of_a_dead_part_that_goes_on_beside_another_part_changes_nothing(
    archives: Path, whole: Path, tmp_path: Path
) -> None:
    assert thaw(archives, whole, tmp_path / "case", "records", "records", "--part", "1/1") == (True, True)
