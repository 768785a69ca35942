"""A real cluster of Ray, of processes on loopback."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from support.process_table import text_of
from support.waiting import until

START_TIMEOUT_S = 120
OPTIONS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "2",
}


class RayCluster:
    """A head with two CPUs and without a dashboard; its current folder is another one than the command's."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short names
        ports = [_free_port(), _free_port()]
        self.address = f"ray://127.0.0.1:{ports[1]}"
        words = [
            *("start", "--head", "--block", "--num-cpus", "2", "--object-store-memory", "80000000"),
            *(
                "--node-ip-address",
                "127.0.0.1",
                "--port",
                str(ports[0]),
                "--ray-client-server-port",
                str(ports[1]),
            ),
            *("--include-dashboard", "false", "--disable-usage-stats"),
        ]
        self._head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # by which its processes are known
        )
        until(lambda: _accepts(ports[1]), timeout_s=START_TIMEOUT_S)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which ``auto`` finds this cluster, by the address file in its folder."""
        return os.environ | OPTIONS | {"RAY_TMPDIR": str(self.folder)}

    def workers(self) -> list[int]:
        """Return the numbers of the processes that run tasks, or wait for some."""
        titles = {pid: text_of(Path(f"/proc/{pid}/cmdline")) for pid in self._processes()}
        return [pid for pid, title in titles.items() if title.startswith("ray::") and "Agent" not in title]

    def end(self) -> None:
        """Stop all processes, kill them, and remove their folder: workers outlive their head."""
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*self.workers(), *self._processes()):
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
        self._head.wait()
        until(lambda: not self._processes())
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[int]:
        session = str(self._head.pid)
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if _session_of(pid) == session]


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start a cluster, and end it."""
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.end()


def _session_of(pid: int) -> str:
    """Return the session of a process; empty if it has ended."""
    fields = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[3] if fields and fields[0] != "Z" else ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
