"""The exit of ``prep`` with closed streams, gone readers, limits, and an early Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardprep.formats.runtime.processes import NOTHING_STARTS
from support.datasets import converted, is_root, prep, prep_here
from support.sampling import needs_mounts, torture_except

PREP = [sys.executable, "-m", "shardprep"]
AS_ANYBODY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if is_root() else []

needs_permissions = pytest.mark.skipif(
    bool(AS_ANYBODY) and not shutil.which("setpriv"), reason="root may read everything"
)


@pytest.fixture
def dataset(archives: Path, tmp_path: Path) -> Path:
    """The validation split in several shards, intact."""
    converted(archives, tmp_path / "val", split="val")
    return tmp_path / "val"


def shell(line: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which "$@" is prep with these arguments."""
    command = ["sh", "-c", line, "sh", *PREP, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_reader_that_is_gone_is_3_and_quiet_and_a_full_disk_is_3_in_a_line(dataset: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        command = [*PREP, "inspect", str(dataset)]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=240)
        unheard = subprocess.run([*PREP, "verify", "/nowhere"], stderr=pipe, timeout=240)

    assert (done.returncode, done.stderr, unheard.returncode) == (3, "", 3)

    done = shell('unset PYTHONUNBUFFERED; "$@" >/dev/full', "inspect", dataset)

    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "full" in done.stderr
    assert "was removed" in shell('cd "$(mktemp -d)" && rmdir "$PWD"; "$@"', "report", dataset).stderr
    line = f'exec 2>/dev/full; "$@" && "$1" -m shardprep convert {dataset}-out {dataset}-in --shorter-side 9'
    assert not shell(line, "export", dataset, f"{dataset}-out", "--to", "folders").returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BrokenPipeError(32, ""), "a worker process ended as soon as it started; start the work again"),
        (RuntimeError("can't start new thread"), NOTHING_STARTS),
    ],
)
def test_a_process_that_cannot_be_started_is_reported(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    monkeypatch.setattr("multiprocessing.popen_spawn_posix.Popen._launch", Mock(side_effect=error))

    done = prep_here("convert", archives, tmp_path / "out", "--workers", "1", "--quiet")

    assert (done.returncode, done.stderr) == (3, f"prep: {told}\n")


def test_an_unexpected_error_is_3_with_its_traceback_and_json() -> None:
    code = "import shardprep.cli.app as app, shardprep.cli.main as main; app.run = lambda words: 1 / 0; main.main()"
    command = [sys.executable, "-c", code, "inspect", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, json.loads(done.stdout)["error"]["exit_code"]) == (3, 3)
    assert "Traceback" in done.stderr
    assert "prep: an unexpected error, see the traceback: ZeroDivisionError: " in done.stderr


STREAMS = """
import os, sys, types
from shardprep.cli import main  # not app: libffi keeps a file open, which would get the number

def run(words):
    is_open = [os.path.samefile(f"/proc/self/fd/{n}", os.devnull) and os.get_inheritable(n) for n in range(3)]
    return 42 if all(is_open) else 1
sys.modules["shardprep.cli.app"] = types.SimpleNamespace(run=run, report_error=None, flush=int)
main.main()
"""


@pytest.mark.slow
def test_no_file_gets_the_number_of_a_closed_stream_here_or_in_a_worker() -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", STREAMS]

    assert subprocess.run(command, timeout=240).returncode == 42


@pytest.mark.slow
@needs_permissions
@pytest.mark.parametrize("command", torture_except(["convert", "verify", "inspect", "repair"], "verify"))
def test_what_must_not_be_read_is_3_and_named(own: Path, dataset: Path, tmp_path: Path, command: str) -> None:
    locked = own if command == "convert" else dataset
    words = {"convert": [own, tmp_path / "out"], "repair": [dataset, "--source", own]}
    locked.chmod(0)

    done = prep(command, *words.get(command, [dataset]), prefix=AS_ANYBODY)
    locked.chmod(0o755)

    assert done.returncode == 3, done.stdout
    assert all(words in done.stderr for words in ("Permission denied", str(locked)))


@pytest.mark.torture
@needs_permissions
def test_an_output_that_cannot_be_written_to_is_said_before_the_work(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)

    for more in ([], ["--dry-run"]):
        done = prep("convert", archives, tmp_path / "locked/out", "--quiet", *more, prefix=AS_ANYBODY)

        assert done.returncode == 3
        assert f"{tmp_path}/locked: Permission denied" in done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_while_still_importing_is_quiet(tmp_path: Path, number: signal.Signals) -> None:
    slow = f"import pathlib, time\npathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(60)\n"
    (tmp_path / "numpy.py").write_text(slow)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = ["env", f"--default-signal={number.name[3:]}", *PREP, "demo"]  # nohup ignores SIGHUP
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)

    assert (process.returncode, errors) == (128 + number, "")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "workers"), torture_except([(4096, 0), (8192, 0), (60_000, 1)], (8192, 0)))
def test_a_file_size_limit_is_not_called_a_full_disk_and_the_next_run_goes_on(
    archives: Path, tmp_path: Path, limit: int, workers: int
) -> None:
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--workers", workers, "--quiet"]

    done = prep(*words, prefix=["prlimit", f"--fsize={limit}"])

    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "ulimit -f" in done.stderr
    assert "disk" not in done.stderr
    assert prep_here(*words).returncode == 0


@needs_mounts
def test_a_disk_with_less_space_than_a_commit_is_reported_as_full(tmp_path: Path) -> None:
    """LMDB reports it as an input/output error."""
    script = f"""
from pathlib import Path
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.shards.lmdb import LmdbShardWriter
from shardprep.formats.shards.read import StoredRecord
with LmdbShardWriter(Path({str(tmp_path / "shard.lmdb")!r}), Unit("", 0, 0, 512, 512 * 30_000, 8)) as writer:
    for number in range(512):
        writer.append(StoredRecord(b"%08d" % number, 0, 0, bytes(30_000)))
"""
    line = f'mount -t tmpfs -o size=12m tmpfs {tmp_path}; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", line, "sh", sys.executable, "-c", script]

    done = subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert re.search("NoSpace: .*the disk is full", done.stderr), done.stderr


@pytest.mark.torture
@needs_mounts
def test_workers_need_no_shared_memory(archives: Path, tmp_path: Path) -> None:
    line = """unshare -m sh -c 'mount -t tmpfs -o nr_inodes=1 tmpfs /dev/shm; exec "$@"' sh "$@" """

    done = shell(line, "convert", archives, tmp_path / "out", "--split", "val", "--workers", 2)

    assert done.returncode == 0, done.stderr
