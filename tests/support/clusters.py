"""Real clusters of Dask and Ray, of processes on loopback, and what happens during a conversion on one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.ports import answers, free_port
from support.process_table import text_of
from support.scripts import session_of
from support.waiting import until

needs_dask = pytest.mark.skipif(not find_spec("distributed"), reason="Dask is not installed")
needs_ray = pytest.mark.skipif(not (find_spec("ray") and find_spec("grpc")), reason="Ray is not installed")

RAY_START_TIMEOUT_S = 120
RAY_OPTIONS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "2",
}


def started(folder: Path, environment: Mapping[str, str], *words: object) -> "subprocess.Popen[bytes]":
    """Start a program of Python in a session of its own, with which its children are killed."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class DaskCluster:
    """A scheduler and two workers, which have another current folder than the command.

    With ``nannies`` each worker is a child of a nanny, which is what ``workers`` has.
    """

    environment = os.environ | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "2s"}  # without a heartbeat

    def __init__(self, *, nannies: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._nannies = nannies
        port = free_port()
        self.address = f"tcp://127.0.0.1:{port}"
        self.scheduler = self._start("dask_scheduler", "--host", "127.0.0.1", "--port", port)
        until(lambda: answers(port))
        self._started = [self.scheduler]
        self.workers = [self._worker(), self._worker()]

    def kill_workers(self) -> None:
        """Kill both workers, and start others."""
        for number in range(2):
            self.workers[number].kill()
            self.workers[number] = self._worker()

    def _worker(self) -> "subprocess.Popen[bytes]":
        limits = ["--nthreads", "1", "--death-timeout", "60", "--nanny" if self._nannies else "--no-nanny"]
        self._started.append(
            self._start("dask_worker", self.address, *limits, "--local-directory", self._folder)
        )
        return self._started[-1]

    def _start(self, program: str, *words: object) -> "subprocess.Popen[bytes]":
        words = ("-m", f"distributed.cli.{program}", *words, "--no-dashboard")
        return started(self._folder, self.environment, *words)

    def close(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RayCluster:
    """A head with two CPUs and without a dashboard; its current folder is another one than the command's."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short names
        port, client_port = free_port(), free_port()
        self.address = f"ray://127.0.0.1:{client_port}"
        words = [
            *("start", "--head", "--block", "--num-cpus", "2", "--object-store-memory", "80000000"),
            *("--node-ip-address", "127.0.0.1", "--port", port, "--ray-client-server-port", client_port),
            *("--include-dashboard", "false", "--disable-usage-stats"),
        ]
        self._head = started(self._folder, self.environment, "-m", "ray.scripts.scripts", *words)
        until(lambda: answers(client_port), timeout_s=RAY_START_TIMEOUT_S)
        # its port answers before it can start the process that serves a client
        begin = [sys.executable, "-c", f"import ray; ray.init({self.address!r})"]
        until(
            lambda: not subprocess.run(begin, env=self.environment, capture_output=True).returncode,
            timeout_s=RAY_START_TIMEOUT_S,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which ``auto`` finds this cluster, by the address file in its folder."""
        return os.environ | RAY_OPTIONS | {"RAY_TMPDIR": str(self._folder)}

    def kill_workers(self) -> None:
        """Kill the processes that run tasks; Ray starts others."""
        self._signal(self._workers(), signal.SIGKILL)

    def _workers(self) -> list[int]:
        titles = {pid: text_of(Path(f"/proc/{pid}/cmdline")) for pid in session_of(self._head.pid)}
        return [pid for pid, title in titles.items() if title.startswith("ray::") and "Agent" not in title]

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, number)

    def close(self) -> None:
        """Stop all processes, and kill them: workers outlive their head."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            self._signal([*self._workers(), *session_of(self._head.pid)], number)
        self._head.wait()
        until(lambda: not session_of(self._head.pid))
        shutil.rmtree(self._folder, ignore_errors=True)


def words(archives: Path, *more: object, output: str = "out", size: int = 60_000) -> list[object]:
    return ["convert", archives, output, "--split", "train", "--shard-size", size, "--quiet", *more]


def shards(output: Path) -> list[Path]:
    return sorted(output.glob("shard-*"))


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do that in another thread; the event is set at the end of the context."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def once_begun(output: Path, act: Callable[[], None]) -> Callable[[threading.Event], None]:
    """Return what does that as soon as there is a shard."""

    def work(ended: threading.Event) -> None:
        until(lambda: ended.is_set() or shards(output))
        act()

    return work
