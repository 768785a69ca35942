"""The matrix of faults: every operation that writes, under every fault, is finished by the same command.

An operation runs under strace, which kills it or fails one of its system calls: the n-th of a kind that
touches the output in an unbroken run. Whatever is left, the inputs are untouched, an error is named without a
traceback, and the same command ends with the tree of the unbroken run, with nothing beside it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardprep.formats import join
from shardprep.formats.exports.export import FORMATS
from support.datasets import converted, prep_here, tree
from support.image_files import JPEG
from support.sampling import sampled, torture_except
from support.source_builders import write

STRACE = shutil.which("strace")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not STRACE, reason="strace is not installed"),
    pytest.mark.timeout(600),
]

SAVE = """
import sys
from shardprep import write_dataset
from shardprep.formats.errors import OperationError
if __name__ == "__main__":
    items = [{"key": f"k{n}", "text": "x" * n} for n in range(9)]
    try:
        write_dataset(items, sys.argv[1], shard_size=1, workers=0)
    except (OperationError, OSError):
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@dataclass(frozen=True)
class Operation:
    """Commands that make ``out``; the first is disturbed. ``start`` is copied to ``out`` before."""

    commands: tuple[str, ...]
    start: str = ""


CONVERT = "prep convert images out --split train --shard-size 1 --workers 0"
OPERATIONS = {
    "convert to LMDB": Operation((CONVERT,)),
    "convert to HDF5": Operation((f"{CONVERT} --format hdf5",)),
    "convert to crop-ready": Operation((f"{CONVERT} --crop-ready",)),
    "convert in parts": Operation((f"{CONVERT} --part 1/2", f"{CONVERT} --part 2/2", CONVERT)),
    "convert to a URL": Operation(
        (CONVERT.replace(" out", " file://{here}/out") + " --scratch {here}/scratch",)
    ),
    "convert columns": Operation((CONVERT.replace("images", "joined"),)),
    "index in place": Operation(("prep index archives out --split val --shard-size 150k --workers 0",)),
    "join": Operation(("prep join out --column size=sizes.csv --workers 0",), start="dataset"),
    "save": Operation(("save.py out",)),
    "repair": Operation(("prep repair out --source images --workers 0",), start="damaged"),
    "fetch": Operation(("prep fetch file://{here}/dataset out",)),
    "publish": Operation(("prep publish dataset file://{here}/out",)),
    "collect": Operation(("prep collect out dataset other",)),
}
for form in FORMATS:
    OPERATIONS[f"export to {form}"] = Operation((f"prep export dataset out --to {form} --workers 0",))

WRITES = ("write", "pwrite64", "pwritev", "writev")
NAMES = ("rename", "renameat2", "linkat", "symlink", "unlink", "mkdir", "rmdir")
FAULTS = {
    "killed": ((*WRITES, "fsync", *NAMES), "signal=SIGKILL", (-9,)),
    "terminated": ((*WRITES, "fsync", *NAMES), "signal=SIGTERM", (143, -15)),
    "interrupted": ((*WRITES, "fsync", *NAMES), "signal=SIGINT", (130, -2)),
    "a full disk": ((*WRITES, "mkdir", "openat"), "error=ENOSPC", (3,)),
    "a bad disk": ((*WRITES, "fsync", "rename"), "error=EIO", (3,)),
    "no descriptor": (("openat",), "error=EMFILE", (3,)),
    "a read-only folder": (("mkdir", "rename", "openat"), "error=EROFS", (3,)),
    "fixed permissions": (("chmod", "fchmodat", "fchmod"), "error=EPERM", ()),
}
"""For each fault, the calls that it is injected at, how, and the exit codes that it may have (or 0)."""


@pytest.fixture(scope="module")
def inputs(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each operation has a copy of."""
    here = tmp_path_factory.mktemp("inputs")
    for number in range(6):
        write(here / "images" / f"class{number % 2}" / f"{number}.jpg", JPEG)
    (here / "archives").symlink_to(archives)
    converted(here / "images", here / "dataset", shard_size=1)
    converted(here / "images", here / "other", shard_size=1, seed=1)
    for copy in ("damaged", "joined"):
        shutil.copytree(here / "dataset", here / copy)
    for name in ("index.npy", "shard-00002.lmdb"):
        (here / "damaged" / name).unlink()
    rows = "".join(f"class{number % 2}/{number}.jpg,{number}\n" for number in range(6))
    (here / "sizes.csv").write_text("key,size\n" + rows)
    join(here / "joined", {"text": here / "sizes.csv#size"}, workers=0)
    (here / "save.py").write_text(SAVE)
    return here


Point = tuple[str, int]


class Place:
    """A folder with the inputs, in which an operation runs."""

    def __init__(self, inputs: Path, here: Path, operation: Operation) -> None:
        self.here, self.out, self.operation = here, here / "out", operation
        self._inputs = {path.name for path in inputs.iterdir()}
        shutil.copytree(inputs, here, symlinks=True, dirs_exist_ok=True)
        self._before = self._now()

    def _now(self) -> dict[str, dict[str, str]]:
        return {name: tree(self.here / name) for name in self._inputs if (self.here / name).is_dir()}

    def begin(self) -> None:
        """Remove what the last run made."""
        for path in self.here.iterdir():
            if path.name not in self._inputs:
                shutil.rmtree(path)
        if self.operation.start:
            shutil.copytree(self.here / self.operation.start, self.out)

    def run(self, number: int = 0, *prefix: str) -> subprocess.CompletedProcess[str]:
        words, pipe = [*prefix, *self.words(number)], subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=self.here, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            said = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return subprocess.CompletedProcess(words, 124, *process.communicate())  # as timeout(1)
        return subprocess.CompletedProcess(words, process.returncode, *said)

    def words(self, number: int = 0) -> list[str]:
        words = self.operation.commands[number].format(here=self.here).split()
        first, *words = [str(self.out) if word == "out" else word for word in words]
        return [sys.executable, *(["-m", "shardprep"] if first == "prep" else [first]), *words]

    def finish(self) -> dict[str, str]:
        """Run all commands; return the tree of the output, beside which nothing may be."""
        for number in range(len(self.operation.commands)):
            is_prep, words = "shardprep" in self.words(number), self.words(number)[3:]
            done = prep_here(*words, cwd=self.here) if is_prep else self.run(number)
            assert done.returncode == 0, done.stderr
        assert self._now() == self._before
        assert {path.name for path in self.here.iterdir()} <= self._inputs | {"out", "scratch"}
        assert not [path for path in self.here.rglob("*") if path.name == ".prep" or ".tmp" in path.name]
        return tree(self.out)

    def inject(self, point: Point, fault: str) -> subprocess.CompletedProcess[str]:
        """Run the first command with a fault at one system call; the inputs must stay."""
        name, number = point
        rules = (f"-etrace={name}", f"-einject={name}:{fault}:when={number}")
        done = self.run(0, str(STRACE), "-f", "-qq", "-o/dev/null", *rules)
        assert self._now() == self._before
        return done


@dataclass(frozen=True)
class Whole:
    """An unbroken run: its tree, and the calls that touch the output, as (name, number) in their thread."""

    place: Place
    tree: dict[str, str]
    points: list[Point]
    log: list[str]


@pytest.fixture(scope="module")
def wholes(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """The unbroken runs, each made when it is first asked for."""

    class Wholes(dict[str, Whole]):
        def __missing__(self, name: str) -> Whole:
            place = Place(inputs, tmp_path_factory.mktemp("place"), OPERATIONS[name])
            place.begin()
            log = place.here.parent / f"{place.here.name}.log"
            calls = ",".join(dict.fromkeys(call for calls, _, _ in FAULTS.values() for call in calls))
            done = place.run(0, str(STRACE), "-f", "--seccomp-bpf", "-y", f"-etrace={calls}", f"-o{log}")
            assert done.returncode == 0, done.stderr
            lines = log.read_text(errors="replace").splitlines()
            self[name] = Whole(place, place.finish(), points_in(lines, str(place.out)), lines)
            return self[name]

    return Wholes()


def points_in(log: list[str], output: str) -> list[Point]:
    """Return the calls that change something below the output, in order.

    Strace counts the calls of each thread, and disturbs the n-th of every thread: all of these must be such.
    """
    counts: Counter[tuple[str, str]] = Counter()
    others: set[Point] = set()
    own: dict[Point, None] = {}
    for line in log:
        if call := re.match(r"(\d+) +(\w+)\((.*)", line):
            thread, name, rest = call.groups()
            counts[thread, name] += 1
            changes = output in rest and (name != "openat" or "O_CREAT" in rest)
            if changes:
                own[name, counts[thread, name]] = None
            else:
                others.add((name, counts[thread, name]))
    return [point for point in own if point not in others]


def chosen(points: list[Point], calls: tuple[str, ...], most: int) -> list[Point]:
    """The middle point of each kind of call, and as many others as there may be."""
    by_call = [[point for point in points if point[0] == call] for call in calls]
    middle = [some[len(some) // 2] for some in by_call if some]
    if len(middle) >= most:
        return sampled(middle, most) if most > 1 else middle[:1]
    own = [point for point in points if point[0] in calls]
    return sorted({*middle, *sampled(own, most - len(middle) + 1)}) if len(own) > 1 else own


def attempt(whole: Whole, point: Point, how: str, codes: tuple[int, ...]) -> None:
    whole.place.begin()
    done = whole.place.inject(point, how)
    if "failed to wake I/O driver" not in done.stderr:  # of tokio, by an eventfd, which no disk can fail
        assert done.returncode in (0, *codes), (point, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr, (point, done.stderr)
    assert whole.place.finish() == whole.tree, point


SAMPLE = ("convert to LMDB", "index in place", "join", "save", "export to mds", "repair", "fetch", "collect")


@pytest.mark.parametrize(("name", "fault"), list(zip(SAMPLE, FAULTS, strict=True)))
def test_an_operation_that_a_fault_ends_is_finished_by_the_same_command(
    wholes: dict[str, Whole], name: str, fault: str
) -> None:
    calls, how, codes = FAULTS[fault]
    (point,) = chosen(wholes[name].points, calls, 1) or chosen(wholes[name].points, FAULTS["killed"][0], 1)

    attempt(wholes[name], point, how, codes)


@pytest.mark.torture
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_so_it_is_at_many_points_for_every_fault(wholes: dict[str, Whole], name: str, fault: str) -> None:
    calls, how, codes = FAULTS[fault]
    for point in chosen(wholes[name].points, calls, 3 if fault == "killed" else 1):
        attempt(wholes[name], point, how, codes)


def test_a_full_disk_of_a_store_is_called_full(wholes: dict[str, Whole]) -> None:
    place = wholes["publish"].place
    place.begin()

    full = (f"-P{place.out}/index.npy#1", "-einject=write:error=ENOSPC")  # written by the store's library
    done = place.run(0, str(STRACE), "-f", "-qq", "-o/dev/null", *full)

    assert (done.returncode, "is full; make room" in done.stderr) == (3, True), done.stderr


@pytest.mark.torture
@pytest.mark.parametrize("name", OPERATIONS)
def test_two_runs_at_once_end_with_the_output_or_a_named_error(wholes: dict[str, Whole], name: str) -> None:
    place = wholes[name].place
    place.begin()
    both = [
        subprocess.Popen(place.words(), cwd=place.here, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]

    assert 0 in [process.returncode for process in both], said
    assert {process.returncode for process in both} <= {0, 2, 3}, said
    assert not any("Traceback" in text for text in said), said
    assert place.finish() == wholes[name].tree


UPLOADS = {"publish", "convert to a URL"}  # by the library of the store, which says when they are kept


@pytest.mark.parametrize("name", torture_except(sorted({*OPERATIONS} - UPLOADS), *SAMPLE))
def test_nothing_gets_its_name_before_its_bytes_are_on_the_disk(wholes: dict[str, Whole], name: str) -> None:
    below = str(wholes[name].place.out)

    assert list(order_faults(wholes[name].log, below)) == []
    without = [call for call in wholes[name].log if "fsync(" not in call]
    assert list(order_faults(without, below))  # the lint sees what it is there to see


def order_faults(calls: list[str], below: str) -> Iterator[str]:
    """Renames of unflushed files, and commits or manifests before the folder of their files is flushed."""
    dirty: set[str] = set()
    unflushed_folders: set[str] = set()
    for call in calls:
        if match := re.match(r"\d+ +(\w+)\(\d+<([^>]*)>", call):
            name, path = match.groups()
            if name in WRITES and path.startswith(below):
                dirty.add(path)
            elif name in ("fsync", "fdatasync"):
                dirty.discard(path)
                unflushed_folders.discard(path)
        elif match := re.match(r'\d+ +rename\("([^"]*)", "([^"]*)"', call):
            built, final = match.groups()
            if built in dirty:
                yield f"{final} was renamed before it was flushed"
            vouches = final.endswith((".commit", "manifest.json"))
            if vouches and unflushed_folders:
                yield f"{final} was published before {unflushed_folders} were flushed"
            unflushed_folders.add(str(Path(final).parent))
