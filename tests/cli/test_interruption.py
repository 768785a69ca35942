"""What Ctrl-C says: which shards are kept, where that is so."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardprep.formats import PlanOptions, convert
from shardprep.formats.runtime.work_folder import finished_shards
from support.datasets import converted, flip, prep

pytestmark = pytest.mark.slow


def interrupt(*words: object, when: Callable[[], object]) -> tuple[int, str, str]:
    """Run ``prep``, send it SIGINT when that is true, and return exit code, stdout and stderr."""
    command = [sys.executable, "-m", "shardprep.cli", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not when() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=60)
    return process.returncode, said, complained


def has_open(process: subprocess.Popen[str], folder: Path) -> bool:
    """Whether the process has a shard of this dataset open."""
    with suppress(OSError):  # it has closed the file, or has ended
        opened = [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        return any(path.parent == folder and path.name.startswith("shard") for path in opened)
    return False


def conversion(archives: Path, output: Path, *words: object) -> list[object]:
    return ["convert", archives, output, "--shard-size", 1, "--workers", 1, "--quiet", *words]


@pytest.mark.torture
def test_a_conversion_says_how_many_shards_are_kept(archives: Path, tmp_path: Path) -> None:
    words = conversion(archives, tmp_path / "out", "--split", "train")

    code, _, complained = interrupt(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    kept = len(finished_shards(tmp_path / "out"))
    match = re.fullmatch(
        r"prep: interrupted; (\d+) of (\d+) shards are done; run it again to continue\n",
        complained,
    )
    assert match, complained
    assert (code, int(match[1])) == (130, kept)
    prep(*words, check=True)


@pytest.mark.torture
def test_the_run_after_it_says_what_it_found(archives: Path, tmp_path: Path) -> None:
    words = conversion(archives, tmp_path / "out", "--split", "train")
    interrupt(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)
    kept = len(finished_shards(tmp_path / "out"))

    again = prep(*(word for word in words if word != "--quiet"), check=True)

    assert re.search(rf"^\S+ {kept} of \d+ shards are done already$", again.stderr, re.M)


@pytest.mark.torture
def test_a_verification_has_nothing_to_go_on_from(archives: Path, tmp_path: Path) -> None:
    convert(archives, tmp_path / "out", split="train", plan_options=PlanOptions(shard_size=1), workers=0)
    command = [sys.executable, "-m", "shardprep.cli", "verify", str(tmp_path / "out")]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        caught = False
        while not caught and process.poll() is None:
            process.send_signal(signal.SIGSTOP)  # so that it cannot end before it is interrupted
            if caught := has_open(process, tmp_path / "out"):
                process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        _, complained = process.communicate(timeout=60)

    assert (process.returncode, complained) == (130, "prep: interrupted\n")


@pytest.mark.torture
def test_a_repair_says_how_many_shards_are_rebuilt(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "out", shard_size=1)
    for shard in (tmp_path / "out").glob("shard-*"):
        flip(shard, shard.stat().st_size // 2)
    words = ["repair", tmp_path / "out", "--source", archives, "--workers", 1, "--quiet"]

    _, _, complained = interrupt(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    kept = len(finished_shards(tmp_path / "out"))
    assert re.search(rf"; {kept} of \d+ shards are rebuilt; run it again to continue", complained), complained
