"""What Ctrl-C says: which shards are kept, where that is so."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats.runtime.work_folder import finished_shards
from support.datasets import converted, flip, prep
from support.scripts import interrupted

pytestmark = pytest.mark.slow


def conversion(archives: Path, output: Path, *words: object) -> list[object]:
    return ["convert", archives, output, "--shard-size", 1, "--workers", 1, "--quiet", *words]


@pytest.mark.torture
def test_a_conversion_says_how_many_shards_are_kept_and_the_next_run_what_it_found(
    archives: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = conversion(archives, output, "--split", "train")

    restarted = interrupted(*words, "--restart", when=lambda: len(finished_shards(output)) > 2)[2]
    before = len(finished_shards(output))
    code, _, complained = interrupted(*words, when=lambda: len(finished_shards(output)) > before + 2)
    kept = len(finished_shards(output))
    finished = prep(*(word for word in words if word != "--quiet"), check=True)

    assert restarted.endswith("shards are done; run it again, without restart, to continue\n")
    match = re.fullmatch(
        r"prep: interrupted; (\d+) of (\d+) shards are done; run it again to continue\n", complained
    )
    assert match, complained
    assert (code, int(match[1])) == (130, kept)
    assert re.search(rf"^\S+ {kept} of \d+ shards are done already$", finished.stderr, re.M)


INTERRUPTED_WHILE_IT_LOCKS = """
import os, signal, threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from shardprep.cli.console.start import Interrupted
from shardprep.cli.main import _on_signals, _unwind

def interrupt():
    asked.wait()
    os.kill(os.getpid(), signal.SIGINT)

for turn in range(150):
    futures, asked = [Future() for _ in range(3)], threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    _on_signals(_unwind)
    try:
        asked.set()
        while True:  # nearly all of the time in the locks of futures
            wait(futures, timeout=0, return_when=FIRST_COMPLETED)
    except Interrupted:
        pass
    thread.join()
    found = []
    other = threading.Thread(target=lambda: found.extend(f._condition.acquire(timeout=5) for f in futures))
    other.start()
    other.join()
    assert all(found), f"turn {turn}: a lock was never released"
"""


INTERRUPTED_IN_A_FINALIZER = """
import os, signal, sys, time
from shardprep.cli import app, main

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs here
            pass

def run(arguments):
    try:
        Finalized()
        time.sleep(30)
    finally:
        print("unwound")

app.run = run
main.main()
"""


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        (INTERRUPTED_WHILE_IT_LOCKS, (0, "", "")),
        (INTERRUPTED_IN_A_FINALIZER, (130, "unwound\n", "prep: interrupted\n")),
    ],
    ids=["locks", "finalizer"],
)
def test_a_signal_is_not_lost_in_a_finalizer_and_leaves_no_lock_of_the_standard_library_behind(
    program: str, ending: tuple[int, str, str]
) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout, done.stderr) == ending


@pytest.mark.torture
def test_each_split_of_a_conversion_is_named(archives: Path, tmp_path: Path) -> None:
    words = conversion(archives, tmp_path / "out")

    _, _, complained = interrupted(*words, when=lambda: len(finished_shards(tmp_path / "out" / "val")) > 2)

    match = re.search(r"; (\d+) of (\d+) shards of train, (\d+) of \d+ shards of val are done; ", complained)
    assert match, complained
    assert match[1] == match[2]
    assert int(match[3]) == len(finished_shards(tmp_path / "out" / "val"))


def test_an_interruption_is_json_where_results_are(archives: Path, tmp_path: Path) -> None:
    words = conversion(archives, tmp_path / "out", "--split", "train", "--json")

    code, said, _ = interrupted(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    error = json.loads(said)["error"]
    assert (code, error["kind"], error["exit_code"], error["signal"]) == (130, "Interrupted", 130, 2)
    assert "shards are done" in error["message"]


@pytest.mark.torture
def test_a_repair_says_how_many_shards_are_rebuilt(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "out", shard_size=1)
    for shard in (tmp_path / "out").glob("shard-*"):
        flip(shard)
    words = ["repair", tmp_path / "out", "--source", archives, "--workers", 1, "--quiet"]

    _, _, complained = interrupted(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    kept = len(finished_shards(tmp_path / "out"))
    assert re.search(rf"; {kept} of \d+ shards are rebuilt; run it again to continue", complained), complained
