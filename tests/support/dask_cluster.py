"""A real cluster of Dask, of processes on loopback."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TIME_TO_LIVE_S = 2  # of a worker that sends no heartbeat


class DaskCluster:
    """A scheduler and two workers, which have another current folder than the command.

    With ``nannies`` each worker is a child of a nanny, which is what ``workers`` has.
    """

    def __init__(self, folder: Path, *, nannies: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        self._nannies = nannies
        self._started: list[subprocess.Popen[bytes]] = []
        folder.mkdir(exist_ok=True)
        port = self.address.rpartition(":")[2]
        self.scheduler = self._start("dask_scheduler", "--host", "127.0.0.1", "--port", port)
        self.workers = [self.worker(), self.worker()]

    def worker(self) -> "subprocess.Popen[bytes]":
        """Start a worker."""
        limits = ["--nthreads", "1", "--death-timeout", "60", "--nanny" if self._nannies else "--no-nanny"]
        return self._start("dask_worker", self.address, *limits, "--local-directory", self._folder)

    def _start(self, program: str, *words: object) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{program}", *map(str, words), "--no-dashboard"],
            cwd=self._folder,
            env=os.environ | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{TIME_TO_LIVE_S}s"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # with the children of nannies
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kill all processes."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def dask_cluster(folder: Path, *, nannies: bool = False) -> Iterator[DaskCluster]:
    """Start a cluster, and end it."""
    cluster = DaskCluster(folder, nannies=nannies)
    try:
        yield cluster
    finally:
        cluster.end()
