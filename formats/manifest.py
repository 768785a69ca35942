"""The manifest: what a dataset is, and the hashes that hold it together. Published last.

``manifest.json`` is canonical JSON, so equal manifests are equal bytes, and any changed byte is
found: it is no JSON, or not canonical, or does not match its own ``root``. The root is the one
string to pin: whoever knows it knows every byte of the dataset.
"""

from __future__ import annotations

import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from .canonical import canonical_json, parse_canonical_json, sha256_of
from .errors import ManifestDamaged, UnknownVersion
from .labels import LabelSpace
from .plan import FORMAT_VERSION
from .shard import CONTAINERS

MANIFEST_NAME = "manifest.json"
PROVENANCE_NAME = "provenance.json"
QUARANTINE_NAME = "quarantine.json"
FORMAT_NAME = "shardprep"
MAX_MANIFEST_BYTES = 64 << 20

KNOWN_KEYS = frozenset(
    [
        "format",
        "version",
        "crit",
        "dataset",
        "labels",
        "source",
        "plan",
        "container",
        "writer",
        "tables",
        "shards",
        "content_root",
        "root",
    ]
)

FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the dataset; ``records`` is its number of rows or records."""

    name: str
    size: int
    sha256: str
    records: int


@dataclass(frozen=True)
class Manifest:
    """A published dataset, validated by :meth:`parse`; the constructor checks nothing.

    ``source``, ``plan`` and ``writer`` are as the converter wrote
    them; ``tables`` are the index and, where there are any, boxes and the quarantine list.
    ``extra`` are keys that a later minor version added and this release can do without.
    """

    split: str
    records: int
    image_bytes: int
    partial: bool
    class_sorted: bool
    skipped: int
    labels: LabelSpace
    source: dict[str, Any]
    plan: dict[str, Any]
    container: str
    writer: dict[str, Any]
    tables: tuple[FileEntry, ...]
    shards: tuple[FileEntry, ...]
    content_root: str
    version: tuple[int, int] = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """SHA-256 over everything else in the manifest: the one line to pin."""
        return sha256_of(self._body())

    def table(self, name: str) -> FileEntry | None:
        """The table of that file name, None where there is none."""
        return next((t for t in self.tables if t.name == name), None)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files that the manifest vouches for."""
        return (*self.tables, *self.shards)

    def _body(self) -> dict[str, Any]:
        return self.extra | {
            "format": FORMAT_NAME,
            "version": list(self.version),
            "crit": [],
            "dataset": {
                "split": self.split,
                "records": self.records,
                "image_bytes": self.image_bytes,
                "partial": self.partial,
                "class_sorted": self.class_sorted,
                "skipped": self.skipped,
            },
            "labels": {
                "space": "sorted_wnid0",
                "classes": self.labels.to_json(),
                "sha256": self.labels.digest,
            },
            "source": self.source,
            "plan": self.plan,
            "container": self.container,
            "writer": self.writer,
            "tables": [asdict(t) for t in self.tables],
            "shards": [asdict(s) for s in self.shards],
            "content_root": self.content_root,
        }

    def to_bytes(self) -> bytes:
        """The file's bytes. The law: ``Manifest.parse(m.to_bytes()) == m``."""
        return canonical_json(self._body() | {"root": self.root})

    @classmethod
    def parse(cls, data: bytes, path: Path | None = None) -> Manifest:
        """Validate all of it. Raises ManifestDamaged listing every finding, or UnknownVersion."""
        try:
            value = parse_canonical_json(data)
        except ValueError as error:
            raise ManifestDamaged(f"{error}", path=path) from error
        _check_version(value, path)
        issues = _issues(value)
        if issues:
            raise ManifestDamaged("; ".join(issues), path=path)
        manifest = cls._from_valid(value)
        if manifest.to_bytes() != data:
            raise ManifestDamaged("holds parts that this release does not know", path=path)
        return manifest

    @classmethod
    def _from_valid(cls, value: dict[str, Any]) -> Manifest:
        return cls(
            **value["dataset"],
            labels=LabelSpace.from_json(value["labels"]["classes"]),
            source=value["source"],
            plan=value["plan"],
            container=value["container"],
            writer=value["writer"],
            tables=tuple(FileEntry(**t) for t in value["tables"]),
            shards=tuple(FileEntry(**s) for s in value["shards"]),
            content_root=value["content_root"],
            version=(value["version"][0], value["version"][1]),
            extra={name: part for name, part in value.items() if name not in KNOWN_KEYS},
        )


def read_manifest(dataset: Path) -> Manifest:
    """The manifest of a dataset folder. Raises ManifestDamaged, UnknownVersion, OSError."""
    path = dataset / MANIFEST_NAME
    try:
        status = path.stat()
    except FileNotFoundError as error:
        message = "no manifest.json: not a dataset, or its conversion has not finished"
        raise ManifestDamaged(message, path=dataset) from error
    if not stat.S_ISREG(status.st_mode):  # a fifo would be waited for
        raise ManifestDamaged("is not a regular file", path=path)
    if status.st_size > MAX_MANIFEST_BYTES:
        raise ManifestDamaged(f"has {status.st_size} bytes, more than any manifest", path=path)
    return Manifest.parse(path.read_bytes(), path)


def _check_version(value: object, path: Path | None) -> None:
    """An unknown major version, or an unknown critical key, is refused before anything is read."""
    if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
        raise ManifestDamaged("is not a shardprep manifest", path=path)
    version, critical = value.get("version"), value.get("crit")
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int for v in version)):
        raise ManifestDamaged(f"has the version {version!r}", path=path)
    if _root_of(value) != value.get("root"):
        raise ManifestDamaged("does not match its own root: it was changed after it was published", path=path)
    if version[0] != FORMAT_VERSION[0] or critical:
        known = ".".join(map(str, FORMAT_VERSION))
        found = ".".join(map(str, version)) + (f" with {critical}" if critical else "")
        raise UnknownVersion(f"format version {found}; this release knows {known}", path=path)


def _root_of(value: dict[str, Any]) -> str:
    return sha256_of({name: part for name, part in value.items() if name != "root"})


def _issues(value: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a manifest of a known version."""
    issues = [f"{name} is not {wanted}" for name, wanted, ok in _shape_checks(value) if not ok]
    if issues:
        return issues
    files = [*value["tables"], *value["shards"]]
    names = [f["name"] for f in files]
    if len(set(names)) != len(names):
        issues.append("a file is listed twice")
    if sum(s["records"] for s in value["shards"]) != value["dataset"]["records"]:
        issues.append("the shards' records do not add up")
    if not value["dataset"]["records"]:
        issues.append("it has no records")
    if LabelSpace.from_json(value["labels"]["classes"]).digest != value["labels"]["sha256"]:
        issues.append("the label space does not match its hash")
    return issues


def _shape_checks(value: dict[str, Any]) -> list[tuple[str, str, bool]]:
    dataset = {
        "split": str,
        "records": int,
        "image_bytes": int,
        "partial": bool,
        "class_sorted": bool,
        "skipped": int,
    }
    plan = {"container": str, "shard_size": int, "order": str, "seed": int, "sha256": str}
    plan |= {"on_bad_image": str, "decode_check": bool}
    checks = [
        ("dataset", "complete", _has_exactly(value.get("dataset"), dataset)),
        ("labels", "complete", _labels_ok(value.get("labels"))),
        ("source", "complete", _holds(value.get("source"), {"layout": str})),
        ("plan", "complete", _holds(value.get("plan"), plan)),
        ("writer", "complete", _holds(value.get("writer"), {})),
        ("container", "one of " + ", ".join(CONTAINERS), value.get("container") in CONTAINERS),
        ("content_root", "a digest", isinstance(value.get("content_root"), str)),
    ]
    for name in ("tables", "shards"):
        part = value.get(name)
        checks.append((name, "a list of files", isinstance(part, list) and all(map(_file_ok, part))))
    return checks


def _holds(value: object, kinds: dict[str, type]) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items())


def _has_exactly(value: object, kinds: dict[str, type]) -> TypeGuard[dict[str, Any]]:
    if not _holds(value, kinds) or value.keys() != kinds.keys():
        return False
    return all(0 <= part < 1 << 63 for part in value.values() if type(part) is int)


def _labels_ok(value: object) -> bool:
    fields = {"name", "words", "ilsvrc2012_id"}
    if not _has_exactly(value, {"space": str, "classes": list, "sha256": str}):
        return False
    return value["space"] == "sorted_wnid0" and all(
        isinstance(c, dict) and c.keys() == fields and isinstance(c["name"], str) for c in value["classes"]
    )


def _file_ok(value: object) -> bool:
    """A name that stays in the folder, a size, a digest, a count."""
    if not _has_exactly(value, {"name": str, "size": int, "sha256": str, "records": int}):
        return False
    return bool(FILE_NAME.fullmatch(value["name"]) and SHA256.fullmatch(value["sha256"]))
