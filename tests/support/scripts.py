"""Programs that a test starts as a user would."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.process_table import text_of
from support.tensorflow_log import without_tensorflow_log
from support.waiting import until

Start = Callable[[str], subprocess.Popen[str]]

TIMEOUT_S = 240  # for a busy machine, far above what programs need


def piped(*words: object, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
    """Start Python in a new session, with its output and errors in pipes."""
    command, env = [sys.executable, *map(str, words)], os.environ | environ
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)


@contextmanager
def scripts(folder: Path, prelude: str, **environ: str) -> Iterator[Start]:
    """Start programs of the prelude and a body, each in a new session; all are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        script = folder / f"train{len(started)}.py"
        script.write_text(prelude + body)
        started.append(process := piped(script, PYTHONWARNINGS="error", **environ))
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the program's own stderr, after all processes of its session have ended."""
    _, said = process.communicate(timeout=TIMEOUT_S)
    until(lambda: not session_of(process.pid))
    return process.returncode, without_tensorflow_log(said)


def session_of(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = text_of(stat).rpartition(")")[2].split()
        if fields and int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def killed(seconds: float, *words: object) -> None:
    """Run ``prep`` for so many seconds, at most, and then kill it."""
    command = [sys.executable, "-m", "shardprep", *map(str, words), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()


def interrupted(*words: object, when: Callable[[], object]) -> tuple[int, str, str]:
    """Run ``prep``, send it SIGINT when that is true, and return exit code, stdout and stderr."""
    command = [sys.executable, "-m", "shardprep", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not when() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said, complained
