"""The existing processes, threads and descriptors."""

import multiprocessing
import threading
from pathlib import Path


def text_of(path: Path) -> str:
    """A file of /proc; empty where its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children() -> set[int]:
    """The child processes of this one, also zombies; without /proc only those that multiprocessing knows."""
    if not Path("/proc/self/task").exists():
        return {child.pid for child in multiprocessing.active_children() if child.pid}
    lists = [text_of(thread / "children") for thread in Path("/proc/self/task").iterdir()]
    pids = {int(pid) for pids in lists for pid in pids.split()}
    return {pid for pid in pids if "resource_tracker" not in text_of(Path(f"/proc/{pid}/cmdline"))}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> set[threading.Thread]:
    """The threads that keep the interpreter alive, and those of this package."""
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("shardprep")}
