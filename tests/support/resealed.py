"""A dataset with false content and valid digests, as an attacker or a later release could publish it."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from support.datasets import writable

Json = dict[str, Any]


def reseal(dataset: Path, change: Callable[[Json], object] = lambda _: None) -> None:
    """Change the manifest; sizes, hashes and the root are those of the current files."""
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for entry in entries_of(manifest):
        data = (dataset / entry["name"]).read_bytes()
        entry |= {"size": len(data), "sha256": "sha256:" + sha256(data).hexdigest()}
    change(manifest)
    manifest.pop("root", None)
    path.unlink()  # it may be a link to another dataset's
    path.write_bytes(canonical_json(manifest | {"root": sha256_of(manifest)}))


def entries_of(manifest: Json) -> list[Json]:
    """The manifest's entries of all files."""
    columns = manifest.get("columns", {"fields": []})["fields"]
    of_columns = [entry for column in columns for entry in (column["table"], *column["shards"])]
    return [*manifest["tables"], *manifest["shards"], *of_columns]


def with_rows(dataset: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Publish a table with other rows."""
    path = writable(dataset / name)
    rows = np.load(path)
    changed = change(rows)
    np.save(path, rows if changed is None else changed)
    reseal(dataset)


def listed(dataset: Path, name: str) -> Json:
    """The manifest's entry of a file."""
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    return next(entry for entry in entries_of(manifest) if entry["name"] == name)
