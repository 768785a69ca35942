"""The conditions of a benchmark, printed with its figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def conditions(*packages: str) -> str:
    """The processor, the usable cores, the load, and the versions of these packages."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    load = os.getloadavg()[0]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}; "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
