"""Made-up profiles of disks, and the keys of their JSON."""

import re
from collections.abc import Iterator
from typing import Any

from shardprep.loaders.measuring.disk import (
    BlockReads,
    DepthReads,
    DiskProfile,
    Measurement,
    Missing,
    Reads,
    SmallFileReads,
)
from support.repository import ROOT


def rate(median: float) -> Measurement:
    return Measurement(median, median * 0.9, median * 1.2, 3, "made up")


def full_profile() -> DiskProfile:
    """A profile with all measurements; 200 MB/s forward and 50 MB/s at random places, cold."""
    reads = Reads(rate(200e6), rate(4e9))
    return DiskProfile(
        path="shards/träin",
        kind="dataset",
        filesystem="ext4",
        files=4,
        bytes=10**9,
        record_bytes=100_000,
        seconds=20.5,
        cold_method="posix_fadvise",
        stream=reads,
        sequential=(BlockReads(rate(150e6), rate(4e9), 1 << 16), BlockReads(rate(190e6), rate(4e9), 4 << 20)),
        random=(
            DepthReads(rate(50e6), rate(4e9), 1, 102_400),
            DepthReads(rate(90e6), rate(5e9), 16, 102_400),
        ),
        small_files=SmallFileReads(100, 100_000, reads, reads),
        writing=rate(100e6),
        missing=Missing(None, None, None),
        remarks=("3 of 4 shards were read",),
    )


def paths_of(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a JSON value with the keys above it: ``random[].cold.median``."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from paths_of(part, f"{prefix}.{name}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for part in value:
            yield from paths_of(part, f"{prefix}[]")
    else:
        yield prefix


def documented_paths(command: str, kind: str) -> set[str]:
    """Every key that the page of a command lists; where a value is of this kind, the keys of the kind."""
    text = (ROOT / "docs" / "reference" / f"{command}.md").read_text()
    objects, of_kind = text.split("## `--json`")[1].split(f"A {kind}:")
    inside = [name for line in table(of_kind) for name in names_in(line)]
    found: set[str] = set()
    for line in table(objects):
        parts = inside if line.split("|")[2].strip() == kind else [""]
        found |= {f"{name}.{part}".rstrip(".") for name in names_in(line) for part in parts}
    return found


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `")]


def names_in(line: str) -> list[str]:
    return re.findall(r"`([^`]+)`", line.split("|")[1])
