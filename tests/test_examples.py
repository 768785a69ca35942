"""The examples do what they say, run as a new user runs them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import text_of
from tensorflow_log import without_tensorflow_log

from shardprep.formats import convert

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *words: object, temporary: Path) -> str:
    """What an example prints; it warns of nothing, and leaves neither a file nor a process."""
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / name, *map(str, words)],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=temporary.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    printed, said = process.communicate(timeout=240)
    assert (process.returncode, without_tensorflow_log(said)) == (0, "")
    assert list(temporary.iterdir()) == []
    eventually_none_of(process.pid)
    temporary.rmdir()
    return printed


def eventually_none_of(session: int) -> None:
    """No process of the session is alive, or will be when multiprocessing's own has noticed the end."""
    deadline = time.monotonic() + 30
    while found := living(session):
        assert time.monotonic() < deadline, f"processes are left: {found}"
        time.sleep(0.05)


def living(session: int) -> list[str]:
    """The states of its processes, without those that only wait to be buried."""
    stats = [text_of(path) for path in Path("/proc").glob("[0-9]*/stat")]
    fields = [stat.rpartition(")")[2].split() for stat in stats if stat]
    return [state for state, _, _, its, *_ in fields if int(its) == session and state != "Z"]


@pytest.mark.parametrize("name", ["train_tensorflow.py", "train_keras.py"])
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    printed = run(name, temporary=tmp_path / "tmp")

    losses = [float(loss) for loss in re.findall(r"(?<!val_)loss:? (\d+\.\d+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


def test_a_stopped_training_goes_on_where_it_was(archives: Path, tmp_path: Path) -> None:
    convert(archives, tmp_path / "shards", workers=0)
    words = (tmp_path / "shards", "--checkpoints", tmp_path / "checkpoints", "--epochs")

    first = run("train_tensorflow.py", *words, 1, temporary=tmp_path / "tmp")
    second = run("train_tensorflow.py", *words, 2, temporary=tmp_path / "tmp")

    assert [line.split(":")[0] for line in first.splitlines()] == ["epoch 0"]
    assert [line.split(":")[0] for line in second.splitlines()] == ["epoch 1"]
