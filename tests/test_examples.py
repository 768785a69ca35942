"""The examples do what they say, run as a new user runs them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from scripts import session_of
from tensorflow_log import without_tensorflow_log

from shardprep.formats import convert, make_sample

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
    while found := session_of(session):
        assert time.monotonic() < deadline, f"processes are left: {found}"
        time.sleep(0.05)


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?<!val_)loss:? (\d+\.\d+)", printed)]


def test_the_loss_falls_with_keras(tmp_path: Path) -> None:
    losses = losses_in(run("train_keras.py", temporary=tmp_path / "tmp"))

    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


def test_the_loss_falls_also_where_a_training_was_stopped_and_goes_on(tmp_path: Path) -> None:
    make_sample(tmp_path / "archives")
    convert(tmp_path / "archives", tmp_path / "shards", workers=0)  # equal to what the example makes itself
    options = ("--checkpoints", tmp_path / "checkpoints", "--epochs")

    first = run("train_tensorflow.py", *options, 3, temporary=tmp_path / "tmp")
    second = run("train_tensorflow.py", tmp_path / "shards", *options, 6, temporary=tmp_path / "tmp")

    epochs = [line.split(":")[0] for line in (first + second).splitlines()]
    assert epochs == [f"epoch {number}" for number in range(6)]
    losses = losses_in(first + second)
    assert losses[-1] < 0.9 * losses[0]
