"""A conversion in parts has the bytes of one in one call, whatever runs at once and whatever is killed."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardprep.formats import (
    ConvertedPart,
    ConvertOptions,
    OutputBusy,
    PlanMismatch,
    PlanOptions,
    UsageError,
    convert,
    convert_part,
    plan_conversion,
    verify,
)
from shardprep.formats.conversion import prepare as preparation
from shardprep.formats.conversion.plan import ConversionPart, plan
from shardprep.formats.conversion.prepare import check_output
from shardprep.formats.images import crop_ready as jpegtran
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.shards import lmdb as lmdb_shard
from shardprep.formats.sources.ilsvrc import OfficialTars
from shardprep.formats.sources.recognise import recognise
from support.column_datasets import write_columns
from support.datasets import converted, flip, prep_here, tree
from support.repository import ROOT

SHARD_SIZE = 60_000
OPTIONS = PlanOptions(shard_size=SHARD_SIZE)


def parts(
    source: Path, output: Path, numbers: Iterable[int], of: int, **options: object
) -> list[ConvertedPart]:
    """Build these parts of train, one after the other, in this process."""
    plan_options = PlanOptions(**{"shard_size": SHARD_SIZE, **options})  # type: ignore[arg-type]
    return [
        convert_part(source, output, (n, of), split="train", plan_options=plan_options, workers=0)[0]
        for n in numbers
    ]


NO_JPEGTRAN = pytest.mark.skipif(not shutil.which(jpegtran.PROGRAM), reason="no jpegtran")
CASES = [
    ({}, (3, 1, 2), 3),
    ({}, (1, 2, 1), 2),
    ({}, (40, 2), 40),
    ({"container": "hdf5"}, (2, 3, 1), 3),
    pytest.param({"crop_ready": True}, (2, 1), 2, marks=NO_JPEGTRAN),
]


@pytest.mark.parametrize(("options", "numbers", "of"), CASES)
def test_parts_in_any_order_and_a_call_without_give_the_bytes_of_one_call(
    archives: Path, tmp_path: Path, options: dict[str, object], numbers: tuple[int, ...], of: int
) -> None:
    converted(archives, tmp_path / "whole", **options)

    built = parts(archives, tmp_path / "out", numbers, of, **options)

    assert not (tmp_path / "out" / "manifest.json").exists()
    assert built[-1].missing == built[-1].total - len({name for one in built for name in one.shards})
    converted(archives, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.torture
def test_parts_of_a_dataset_with_columns_give_the_bytes_of_one_call(tmp_path: Path) -> None:
    write_columns(tmp_path / "source", 20, options=PlanOptions(shard_size=9000))
    converted(tmp_path / "source", tmp_path / "whole", shard_size=3000)

    parts(tmp_path / "source", tmp_path / "out", (2, 3, 1), 3, shard_size=3000)

    converted(tmp_path / "source", tmp_path / "out", shard_size=3000)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 12))
def test_each_shard_of_all_splits_is_in_one_part_and_parts_differ_by_one_shard(
    sizes: list[int], of: int
) -> None:
    plans = [_Planned(size) for size in sizes]

    shares = [[*ConversionPart(number, of).shares(plans)] for number in range(1, of + 1)]  # type: ignore[arg-type]

    for split, size in enumerate(sizes):
        assert sorted(shard.number for share in shares for shard in share[split]) == [*range(size)]
    counts = [sum(map(len, share)) for share in shares]
    assert max(counts) - min(counts) <= 1


class _Planned:
    """A plan of which only the shards' numbers count."""

    def __init__(self, shards: int) -> None:
        self.shards = [_Numbered(n) for n in range(shards)]


class _Numbered:
    def __init__(self, number: int) -> None:
        self.number = number


def test_splits_without_a_name_of_one_are_converted_in_parts_too(archives: Path, tmp_path: Path) -> None:
    convert(archives, tmp_path / "whole", plan_options=OPTIONS, workers=0)

    for number in (2, 1):
        convert_part(archives, tmp_path / "out", (number, 2), plan_options=OPTIONS, workers=0)

    convert(archives, tmp_path / "out", plan_options=OPTIONS, workers=0)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_part_with_other_options_or_libraries_than_the_others_is_refused(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts(archives, tmp_path / "out", [1], 2)
    before = tree(tmp_path / "out")

    with pytest.raises(PlanMismatch, match="--seed was 0, is now 1"):
        parts(archives, tmp_path / "out", [2], 2, seed=1)
    with pytest.raises(PlanMismatch, match="--seed was 0, is now 1"):
        converted(archives, tmp_path / "out", seed=1)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    for newer, text in (
        (partial(monkeypatch.setattr, lmdb_shard.lmdb, "version", lambda: (0, 9, 1)), "lmdb 0.9.1"),
        (partial(monkeypatch.setattr, preparation, "version", lambda package: "99"), "shardprep 99"),
    ):
        newer()
        with pytest.raises(
            PlanMismatch, match=rf"writer was shardprep \d.*, is now .*{text},.* machine node7"
        ):
            parts(archives, tmp_path / "out", [2], 2)

    assert tree(tmp_path / "out") == before


def test_a_part_and_a_call_without_exclude_each_other_and_parts_do_not(
    archives: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with WorkFolder(output, shared=True):
        parts(archives, output, [1], 2)
        with pytest.raises(OutputBusy):
            converted(archives, output)
        words = ["--split", "train", "--shard-size", SHARD_SIZE, "--quiet"]
        assert prep_here("convert", archives, output, *words).returncode == 3

    with WorkFolder(output):
        with pytest.raises(OutputBusy):
            parts(archives, output, [2], 2)
        assert prep_here("convert", archives, output, *words, "--part", "2/2").returncode == 3


def test_a_part_removes_the_folders_of_dead_runs_and_of_no_other(archives: Path, tmp_path: Path) -> None:
    work = tmp_path / "out" / ".prep"
    with WorkFolder(tmp_path / "out", shared=True) as alive:
        (alive.run / "shard-00000.lmdb.tmp").write_bytes(b"half")
        (work / "run-that-is-dead").mkdir()
        (work / "run-that-is-dead" / "alive").touch()

        parts(archives, tmp_path / "out", [1], 2)

        assert [*work.glob("run-*")] == [alive.run]
        assert (alive.run / "shard-00000.lmdb.tmp").read_bytes() == b"half"


@pytest.fixture
def headers_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits of which the headers of an archive were read, in order."""
    read: list[str] = []
    real = OfficialTars._listed

    def listed(self: OfficialTars, archive: object, split: str, problems: object) -> object:
        read.append(split)
        return real(self, archive, split, problems)  # type: ignore[arg-type]

    monkeypatch.setattr(OfficialTars, "_listed", listed)
    return read


def test_the_headers_of_archives_are_read_once_for_all_parts(
    archives: Path, tmp_path: Path, headers_read: list[str]
) -> None:
    for number in (1, 2, 3):
        convert_part(archives, tmp_path / "out", (number, 3), plan_options=OPTIONS, workers=0)

    convert(archives, tmp_path / "out", plan_options=OPTIONS, workers=0)

    assert headers_read == ["train", "val", "test"]


def test_a_damaged_listing_is_not_used(archives: Path, tmp_path: Path, headers_read: list[str]) -> None:
    parts(archives, tmp_path / "out", [1], 2)
    (stored,) = (tmp_path / "out" / ".prep").glob("listing-*.npy")
    flip(stored, 300)

    parts(archives, tmp_path / "out", [2], 2)

    converted(archives, tmp_path / "out")
    converted(archives, tmp_path / "whole")
    assert headers_read == ["train"] * 3
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("changed", ["ILSVRC2012_img_train.tar", "ILSVRC2012_devkit_t12.tar.gz"])
def test_a_source_that_changed_between_two_parts_is_refused(
    archives: Path, tmp_path: Path, changed: str
) -> None:
    source = Path(shutil.copytree(archives, tmp_path / "source"))
    parts(source, tmp_path / "out", [1], 2)
    os.utime(source / changed, ns=(1, 1))

    with pytest.raises(PlanMismatch, match="source changed"):
        parts(source, tmp_path / "out", [2], 2)


def test_what_a_listing_is_known_by_tells_other_labels(archives: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(archives, tmp_path / "source"))
    known = recognise(source).known_by("val")
    labels = "".join(f"ILSVRC2012_val_{n:08d},n02009229 1 2 3 4\n" for n in range(1, 11))
    (source / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{labels}")

    assert recognise(source).known_by("val") != known


def test_a_listing_of_known_entries_is_that_of_the_archive(archives: Path) -> None:
    source = recognise(archives)
    for split in source.splits:
        listing = source.listing(split)

        again = source.survey_of(split, listing.entries.copy())

        assert plan(again, OPTIONS).digest == plan(listing, OPTIONS).digest
        assert again.reader == listing.reader


@pytest.mark.parametrize("part", ["0/3", "4/3", "1/0", "1", "a/3", "-1/3", "1/3/5", ""])
def test_a_part_that_does_not_exist_is_refused(archives: Path, tmp_path: Path, part: str) -> None:
    done = prep_here("convert", archives, tmp_path / "out", "--part", part)

    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


def test_a_part_that_does_not_exist_is_refused_in_a_program_too(archives: Path, tmp_path: Path) -> None:
    for part in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(UsageError, match="no part"):
            convert_part(archives, tmp_path / "out", part)
    with pytest.raises(UsageError, match="restart"):
        convert_part(archives, tmp_path / "out", (1, 2), options=ConvertOptions(restart=True))


def test_a_part_makes_nothing_where_other_files_are(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("three years")

    with pytest.raises(UsageError, match="not empty"):
        parts(archives, tmp_path / "out", [1], 2)

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_part_of_a_finished_conversion_reads_no_image_and_leaves_nothing(
    archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "out")
    before = tree(tmp_path / "out")

    first, second = parts(archives, tmp_path / "out", (1, 2), 2)

    assert first.already_complete
    assert len(first.shards) + len(second.shards) == first.total
    assert first.records + second.records == 24
    assert tree(tmp_path / "out") == before
    with pytest.raises(PlanMismatch):
        parts(archives, tmp_path / "out", [1], 2, seed=1)


def test_a_part_that_the_end_of_the_conversion_overtakes_leaves_nothing(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["shardprep.formats.conversion.convert"]
    real = module.prepare

    def prepare(*given: object) -> object:
        prepared = real(*given)
        monkeypatch.undo()
        converted(archives, tmp_path / "out")
        return prepared

    monkeypatch.setattr(module, "prepare", prepare)

    (part,) = parts(archives, tmp_path / "out", [1], 2)

    assert part.already_complete
    assert verify(tmp_path / "out").findings == []


def test_a_dry_run_of_a_part_counts_its_shards_and_writes_nothing(archives: Path, tmp_path: Path) -> None:
    whole = plan_conversion(archives, tmp_path / "out", plan_options=OPTIONS, workers=0).splits
    shares = [
        plan_conversion(archives, tmp_path / "out", plan_options=OPTIONS, workers=0, part=(n, 2)).splits
        for n in (1, 2)
    ]

    for name in ("shards", "images", "image_bytes"):
        sums = [sum(getattr(share[n], name) for share in shares) for n in range(3)]
        assert sums == [getattr(split, name) for split in whole]
    assert not (tmp_path / "out").exists()


def test_a_part_is_told_as_json(archives: Path, tmp_path: Path) -> None:
    words = ["convert", archives, tmp_path / "out", "--shard-size", SHARD_SIZE, "--workers", 0, "--quiet"]

    told = json.loads(prep_here(*words, "--part", "2/2", "--json").stdout)

    assert (told["part"], told["parts"]) == (2, 2)
    for split in told["splits"]:
        assert split["total_shards"] - len(split["shards"]) == split["missing_shards"]
        assert all((Path(split["path"]) / shard).is_file() for shard in split["shards"])


def started(archives: Path, output: Path, container: str, part: str) -> subprocess.Popen[bytes]:
    words = ["--split", "train", "--shard-size", "60000", "--format", container, "--workers", "1", "--quiet"]
    command = [sys.executable, "-m", "shardprep.cli", "convert", archives, output, *words, "--part", part]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.torture
@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_parts_killed_at_any_time_among_running_ones_give_the_bytes_of_one_call(
    archives: Path, tmp_path: Path, container: str
) -> None:
    converted(archives, tmp_path / "whole", container=container)
    chance = random.Random(1)
    output = tmp_path / "out"
    for _ in range(8):
        running = [started(archives, output, container, part) for part in ("1/2", "2/2", "2/2")]
        time.sleep(chance.uniform(0.3, 2.5))
        chance.shuffle(running)
        for process in running:
            kill(process)
            time.sleep(chance.uniform(0, 0.2))
    ends = [started(archives, output, container, part) for part in ("1/2", "2/2", "1/2")]

    for process in ends:
        assert process.communicate()[1] == b""
        assert process.returncode == 0
    assert [*(output / ".prep").glob("run-*")] == []
    converted(archives, output, container=container)
    assert tree(output) == tree(tmp_path / "whole")


@pytest.mark.torture
def test_the_script_for_slurm_builds_the_parts_and_finishes(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "whole")
    words = [archives, tmp_path / "out", "--split", "train", "--shard-size", str(SHARD_SIZE)]
    command = ["bash", ROOT / "examples" / "slurm" / "convert.sbatch", *words]
    found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}

    for task in ({"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "2"}, {}):  # the other task was killed
        subprocess.run(command, env=os.environ | found | task, check=True, capture_output=True)

    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_output_that_another_part_begins_meanwhile_is_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, output = Path.iterdir, tmp_path / "out"
    output.mkdir()

    def late(path: Path) -> Iterator[Path]:
        monkeypatch.undo()
        with WorkFolder(output, shared=True):
            return iter([*listed(path)])

    monkeypatch.setattr(Path, "iterdir", late)
    check_output(output)
