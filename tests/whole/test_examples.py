"""The examples do what they say, run as a new user runs them."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import convert, make_sample
from support.repository import ROOT
from support.scripts import piped, session_of
from support.tensorflow_log import without_tensorflow_log
from support.waiting import until

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
OF_TORCH = ("torchelastic_", "torchinductor_")  # what torch itself leaves in the temporary folder


def run(name: str, *words: object, temporary: Path, launcher: tuple[str, ...] = ()) -> str:
    """What an example prints; it warns of nothing, and leaves neither a file nor a process."""
    temporary.mkdir()
    environ, command = (
        {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},  # by AutoGraph
        (*launcher, EXAMPLES / name, *words),
    )
    process = piped(*command, cwd=temporary.parent, **environ)
    printed, said = process.communicate(timeout=240)
    assert (process.returncode, without_tensorflow_log(said)) == (0, "")
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(OF_TORCH)] == []
    # multiprocessing's own process notices the end later
    until(lambda: not session_of(process.pid))
    shutil.rmtree(temporary)
    return printed


def check_losses(printed: str) -> None:
    """Check that the loss falls in six epochs."""
    losses = [float(loss) for loss in re.findall(r"(?<!val_)loss:? (\d+\.\d+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.torture
def test_a_training_with_keras_learns(tmp_path: Path) -> None:
    check_losses(run("train_keras.py", temporary=tmp_path / "keras"))


@pytest.mark.torture
def test_a_training_with_tensorflow_that_is_stopped_goes_on_where_it_was_and_learns(tmp_path: Path) -> None:
    make_sample(tmp_path / "archives")
    convert(tmp_path / "archives", tmp_path / "shards", workers=0)  # equal to what the example makes itself
    options = ("--checkpoints", tmp_path / "checkpoints", "--epochs")

    printed = run("train_tensorflow.py", *options, 3, temporary=tmp_path / "first")
    printed += run("train_tensorflow.py", tmp_path / "shards", *options, 6, temporary=tmp_path / "second")

    check_losses(printed)
    assert [line.split(":")[0] for line in printed.splitlines()] == [f"epoch {n}" for n in range(6)]


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("launcher", "middle", "end"), [((), 12, 54), (TORCHRUN, 6, 24)], ids=["alone", "torchrun"]
)
def test_a_torch_training_that_goes_on_within_an_epoch_ends_as_one_that_was_not_stopped(
    launcher: tuple[str, ...], middle: int, end: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    options = ("--save-every", 6, "--checkpoints")
    whole, rest = tmp_path / "whole", tmp_path / "rest"

    printed = run("train_torch.py", *options, whole, temporary=tmp_path / "first", launcher=launcher)
    rest.mkdir()
    shutil.copy(whole / f"step{middle:08}.pt", rest)
    again = run("train_torch.py", *options, rest, temporary=tmp_path / "second", launcher=launcher)

    check_losses(printed)
    assert again.splitlines() == printed.splitlines()[1:]
    ends = [torch.load(folder / f"step{end:08}.pt", weights_only=True) for folder in (whole, rest)]
    assert all(torch.equal(*of_both) for of_both in zip(*map(tensors_of, ends), strict=True))
    assert ends[0]["places"] == ends[1]["places"]


def tensors_of(checkpoint: dict[str, Any]) -> list[Any]:
    """The weights, and what the optimizer keeps for each of them."""
    kept = checkpoint["optimizer"]["state"].values()
    return [*checkpoint["network"].values(), *(tensor for each in kept for tensor in each.values())]


def test_the_jobs_for_kubernetes_build_each_part_once_and_finish_with_the_same_options(
    tmp_path: Path,
) -> None:
    yaml: Any = pytest.importorskip("yaml")
    parts, finish = yaml.safe_load_all((EXAMPLES / "kubernetes" / "convert.yaml").read_text())
    assert [job["metadata"]["labels"]["step"] for job in (parts, finish)] == ["parts", "finish"]
    (tmp_path / "prep").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "prep").chmod(0o755)

    def printed(job: Any, **variables: str) -> str:
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()

    count = parts["spec"]["completions"]
    assert printed(parts, JOB_COMPLETION_INDEX=str(count - 1)) == f"{printed(finish)} --part {count}/{count}"
    assert printed(parts, JOB_COMPLETION_INDEX="0").endswith(f" --part 1/{count}")
    pods = [job["spec"]["template"]["spec"] for job in (parts, finish)]
    assert pods[0]["volumes"] == pods[1]["volumes"]
