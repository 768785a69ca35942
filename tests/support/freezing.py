"""Conversions with a worker that stops (SIGSTOP) at a chosen moment, outlives its parent, and continues."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from support.process_table import text_of
from support.waiting import until

TIMEOUT_S = 30.0

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
        given = {
            "FREEZE_OUTPUT": output,
            "FREEZE_MARKER": self._marker,
            "FREEZE_AT": at,
            "PYTHONPATH": folder,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardprep.cli", *map(str, words), "--workers", "1"],
            env=os.environ | {name: str(value) for name, value in given.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def stopped(self) -> bool:
        """Wait until the worker has stopped; False where all work is done before that."""
        until(lambda: self._pid() or self.process.poll() is not None)
        if self._pid():
            until(lambda: state_of(self._pid()) == "T")
        return bool(self._pid())

    def _pid(self) -> int:
        return int(text_of(self._marker) or 0) if self._marker.exists() else 0

    def kill_parent(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def thaw(self) -> None:
        """Continue the worker."""
        os.kill(self._pid(), signal.SIGCONT)

    def await_worker(self) -> None:
        """Wait until the worker has ended by itself."""
        until(lambda: state_of(self._pid()) in ("", "Z", "X"))

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
