"""A conversion in parts has the bytes of one in one call, whatever runs at once and whatever is killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from shardprep.formats import ConvertedPart, ConvertOptions, PlanOptions, convert_part
from shardprep.formats.conversion.plan import deal_shards
from shardprep.formats.errors import PlanMismatch, UsageError
from shardprep.formats.runtime.work_folder import WorkFolder
from support.datasets import converted, prep_here, tree
from support.repository import ROOT
from support.source_builders import write

SHARD_SIZE = 60_000


def parts(
    source: Path, output: Path, numbers: Iterable[int], of: int, **options: object
) -> list[ConvertedPart]:
    """Build these parts of train, one after the other, in this process."""
    plan_options = PlanOptions(**{"shard_size": SHARD_SIZE, **options})  # type: ignore[arg-type]
    return [
        convert_part(source, output, (n, of), split="train", plan_options=plan_options, workers=0)[0]
        for n in numbers
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 12))
def test_each_shard_of_all_splits_is_in_one_part_and_parts_differ_by_one(sizes: list[int], of: int) -> None:
    plans = [SimpleNamespace(shards=[SimpleNamespace(number=n) for n in range(size)]) for size in sizes]

    dealt = [[*deal_shards(plans, (number, of))] for number in range(1, of + 1)]  # type: ignore[arg-type]

    for split, size in enumerate(sizes):
        assert sorted(shard.number for share in dealt for shard in share[split]) == [*range(size)]
    counts = [sum(map(len, share)) for share in dealt]
    assert max(counts) - min(counts) <= 1


def test_a_part_removes_the_folders_of_dead_runs_and_of_no_other(archives: Path, tmp_path: Path) -> None:
    work = tmp_path / "out" / ".prep"
    with WorkFolder(tmp_path / "out", shared=True) as alive:
        (alive.run / "shard-00000.lmdb.tmp").write_bytes(b"half")
        (work / "run-that-is-dead").mkdir()
        (work / "run-that-is-dead" / "alive").touch()

        parts(archives, tmp_path / "out", [1], 2)

        assert [*work.glob("run-*")] == [alive.run]
        assert (alive.run / "shard-00000.lmdb.tmp").read_bytes() == b"half"


@pytest.mark.parametrize("changed", ["ILSVRC2012_img_train.tar", "ILSVRC2012_devkit_t12.tar.gz"])
def test_a_source_that_changed_between_two_parts_is_refused(own: Path, tmp_path: Path, changed: str) -> None:
    parts(own, tmp_path / "out", [1], 2)
    os.utime(own / changed, ns=(1, 1))

    with pytest.raises(PlanMismatch, match="source changed"):
        parts(own, tmp_path / "out", [2], 2)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1/0", "1", "a/3", "-1/3", "1/3/5", ""])
def test_a_part_that_does_not_exist_is_refused(archives: Path, tmp_path: Path, part: str) -> None:
    assert prep_here("convert", archives, tmp_path / "out", "--part", part).returncode == 2
    if re.fullmatch(r"\d/\d", part):
        number, of = map(int, part.split("/"))
        with pytest.raises(UsageError, match="no part"):
            convert_part(archives, tmp_path / "out", (number, of))
    with pytest.raises(UsageError, match="restart"):
        convert_part(archives, tmp_path / "out", (1, 2), options=ConvertOptions(restart=True))
    assert not (tmp_path / "out").exists()


def test_a_part_leaves_a_folder_with_anything_else_alone(archives: Path, tmp_path: Path) -> None:
    write(tmp_path / "train/mine.txt", b"")
    with pytest.raises(UsageError, match="is not empty"):
        convert_part(archives, tmp_path, (1, 2), split="train")
    assert [*tmp_path.rglob("*")] == [tmp_path / "train", tmp_path / "train/mine.txt"]


def test_a_part_of_a_finished_conversion_reads_no_image_and_leaves_nothing(
    archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "out")
    before = tree(tmp_path / "out")

    first, second = parts(archives, tmp_path / "out", (1, 2), 2)

    assert first.already_complete
    assert len(first.shards) + len(second.shards) == first.total
    assert first.records + second.records == 24
    words = ("convert", archives, tmp_path / "out", "--split=train", "--shard-size=60000", "--part=1/2")
    assert prep_here(*words).stdout.endswith("\nthe conversion is finished\n")
    assert tree(tmp_path / "out") == before
    with pytest.raises(PlanMismatch):
        parts(archives, tmp_path / "out", [1], 2, seed=1)


def test_a_part_is_told_as_json(archives: Path, tmp_path: Path) -> None:
    words = ["convert", archives, tmp_path / "out", "--shard-size", SHARD_SIZE, "--workers", 0, "--quiet"]

    done = prep_here(*words, "--part", "2/2", "--json")

    told = json.loads(done.stdout)
    assert (told["part"], told["parts"], done.stderr) == (2, 2, "")
    for split in told["splits"]:
        assert split["total_shards"] - len(split["shards"]) == split["missing_shards"]
        assert all((Path(split["path"]) / shard).is_file() for shard in split["shards"])


def started(archives: Path, output: Path, container: str, part: str) -> subprocess.Popen[bytes]:
    words = ["--split", "train", "--shard-size", "60000", "--format", container, "--workers", "1", "--quiet"]
    command = [sys.executable, "-m", "shardprep", "convert", archives, output, *words, "--part", part]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


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
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            time.sleep(chance.uniform(0, 0.2))
    for process in [started(archives, output, container, part) for part in ("1/2", "2/2", "1/2")]:
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
