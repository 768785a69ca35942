"""Profiles as files: JSON that is taken only where it is one, whole."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...formats.errors import DataError, UnknownVersion
from ...formats.text_file import read_small_file
from .profile import (
    FORMAT,
    VERSION,
    BlockReads,
    DepthReads,
    DiskProfile,
    Measurement,
    Missing,
    Reads,
    SmallFileReads,
)

LARGEST = 1 << 20
ADVICE = "measure again with prep bench-disk --save"


def save(profile: DiskProfile, path: str | os.PathLike[str]) -> None:
    """Write beside and rename, so that nobody finds half of it."""
    final = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps(profile.to_json(), indent=2) + "\n")
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(final)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> DiskProfile:
    """The profile of a file; the errors name it."""
    try:
        return parsed(json.loads(read_small_file(Path(path), LARGEST)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not a disk profile: it is not JSON; {ADVICE}", path=path) from error
    except (DataError, UnknownVersion) as error:
        raise type(error)(error.message, path=path) from error


def parsed(value: Any) -> DiskProfile:
    """Taken only if the profile made of it has exactly this JSON: nothing missing, foreign or changed."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"is not a disk profile; {ADVICE}")
    if value.get("version") != VERSION:
        raise UnknownVersion(
            f"profile version {value.get('version')}; this release knows {VERSION}; {ADVICE}"
        )
    try:
        profile = _profile(value)
        same = json.dumps(profile.to_json(), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"is a damaged disk profile ({type(error).__name__}: {error}); {ADVICE}") from error
    if not same:
        raise DataError(f"is a damaged disk profile: its parts do not fit together; {ADVICE}")
    return profile


def _profile(value: dict[str, Any]) -> DiskProfile:
    small = value["small_files"]
    return DiskProfile(
        **{name: _typed(value[name], kind) for name, kind in FIELDS.items()},
        stream=_reads(value["stream"]),
        sequential=tuple(_blocks(each) for each in value["sequential"]),
        random=tuple(_depths(each) for each in value["random"]),
        small_files=None if small is None else _small_files(small),
        writing=_measurement(value["writing"]),
        missing=Missing(**{k: _typed(v, str | None) for k, v in value["missing"].items()}),
        remarks=tuple(_typed(remark, str) for remark in value["remarks"]),
    )


FIELDS: dict[str, Any] = {
    "path": str,
    "kind": str,
    "filesystem": str,
    "files": int,
    "bytes": int,
    "record_bytes": int,
    "seconds": float,
    "cold_method": str | None,
}


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} is out of place")
    return value


def _measurement(value: Any) -> Measurement | None:
    if value is None:
        return None
    kinds = {"median": float, "low": float, "high": float, "repetitions": int, "method": str}
    return Measurement(**{name: _typed(value[name], kind) for name, kind in kinds.items()})


def _reads(value: Any) -> Reads:
    return Reads(_measurement(value["cold"]), _measurement(value["warm"]))


def _blocks(value: Any) -> BlockReads:
    reads = _reads(value)
    return BlockReads(reads.cold, reads.warm, _typed(value["block_bytes"], int))


def _depths(value: Any) -> DepthReads:
    reads = _reads(value)
    depth, size = (_typed(value[name], int) for name in ("queue_depth", "block_bytes"))
    return DepthReads(reads.cold, reads.warm, depth, size)


def _small_files(value: Any) -> SmallFileReads:
    count, size = (_typed(value[name], int) for name in ("count", "file_bytes"))
    return SmallFileReads(count, size, _reads(value["files"]), _reads(value["shard"]))
