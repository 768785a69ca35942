"""The schema of a manifest: its parts, their types, and what must agree between them.

:class:`~shardprep.formats.dataset.manifest.Manifest` keeps every part of a manifest that passes these checks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from shardprep.formats.containers.archive import MOST_ARCHIVE_BYTES
from shardprep.formats.containers.registry import ALL_CONTAINERS, IN_PLACE
from shardprep.formats.images.kinds.image_info import LATER_KINDS
from shardprep.formats.records.labels import MAX_CLASS_ID, label_digest

from .column_checks import column_issues, columns_ok
from .json_shape import SHA256, file_ok, has_exactly, holds

CRITICAL_KEYS = ("kinds", "crop_ready", "columns", "archive")


def unknown_parts(critical: list[Any], kinds: object) -> list[Any]:
    """Return the critical keys, and the kinds of images, that this release does not know."""
    listed = kinds if isinstance(kinds, list) and "kinds" in critical else []
    unknown = [name for name in critical if name not in CRITICAL_KEYS]
    return unknown + [kind for kind in listed if isinstance(kind, str) and kind not in LATER_KINDS]


def issues_of(value: dict[str, Any]) -> list[str]:
    """Return everything that is wrong with a manifest of a known version."""
    issues = [f"{name} is not {wanted}" for name, wanted, ok in _shape_checks(value) if not ok]
    if issues:
        return issues
    columns = value.get("columns", {"fields": []})["fields"]
    files = [*value["tables"], *value["shards"]]
    files += [file for column in columns for file in (column["table"], *column["shards"])]
    names = [f["name"] for f in files]
    if len(set(names)) != len(names):
        issues.append("a file is listed twice")
    if "archive" in value and len(value["archive"]["regions"]) != len(value["shards"]):
        issues.append("the archive's regions are not the shards'")
    if sum(s["records"] for s in value["shards"]) != value["dataset"]["records"]:
        issues.append("the shards' records do not add up")
    if not value["dataset"]["records"]:
        issues.append("it has no records")
    if label_digest(c["name"] for c in value["labels"]["classes"]) != value["labels"]["sha256"]:
        issues.append("the label space does not match its hash")
    return issues + (column_issues(value) if "columns" in value else [])


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
        ("dataset", "complete", has_exactly(value.get("dataset"), dataset)),
        ("labels", "complete", _labels_ok(value.get("labels"))),
        ("source", "complete", holds(value.get("source"), {"layout": str})),
        ("plan", "complete", holds(value.get("plan"), plan)),
        ("writer", "complete", holds(value.get("writer"), {})),
        ("container", "one of " + ", ".join(ALL_CONTAINERS), value.get("container") in ALL_CONTAINERS),
        ("crit", "the list of critical keys that are there", value.get("crit") == _critical_in(value)),
        ("kinds", "a list of kinds in order", _kinds_ok(value.get("kinds", ["WebP"]))),
        ("crop_ready", "a number of images", _is_count(value.get("crop_ready", 1))),
        (
            "columns",
            "a list of columns with their files",
            "columns" not in value or columns_ok(value["columns"]),
        ),
        ("archive", "the archive of images that stay in it", _archive_ok(value)),
        ("content_root", "a digest", isinstance(value.get("content_root"), str)),
    ]
    for name in ("tables", "shards"):
        part = value.get(name)
        checks.append((name, "a list of files", isinstance(part, list) and all(map(file_ok, part))))
    return checks


def _critical_in(value: dict[str, Any]) -> list[str]:
    return [name for name in CRITICAL_KEYS if name in value]


def _kinds_ok(value: object) -> bool:
    """Whether the value names some kinds, in their order and each once."""
    return (
        isinstance(value, list) and value != [] and value == [kind for kind in LATER_KINDS if kind in value]
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _archive_ok(value: dict[str, Any]) -> bool:
    """Whether there is an archive exactly where images stay in one, and it has regions with digests."""
    if value.get("container") != IN_PLACE:
        return "archive" not in value
    archive = value.get("archive")
    if not has_exactly(archive, {"name": str, "block_bytes": int, "regions": list}):
        return False
    regions = archive["regions"]
    if not (_is_text(archive["name"]) and archive["block_bytes"] and all(map(_region_ok, regions))):
        return False
    return "columns" not in value and sum(region["size"] for region in regions) <= MOST_ARCHIVE_BYTES


def _region_ok(value: object) -> bool:
    return has_exactly(value, {"size": int, "sha256": str}) and bool(SHA256.fullmatch(value["sha256"]))


def _labels_ok(value: object) -> bool:
    """Whether the classes' names are unique and in order, so that a label is one class."""
    if not has_exactly(value, {"space": str, "classes": list, "sha256": str}):
        return False
    classes = value["classes"]
    if value["space"] != "sorted_wnid0" or not all(map(_class_ok, classes)):
        return False
    return all(one["name"] < other["name"] for one, other in pairwise(classes))


def _class_ok(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"name", "words", "ilsvrc2012_id"}:
        return False
    name, words, number = value["name"], value["words"], value["ilsvrc2012_id"]
    if not _is_text(name) or not (words is None or _is_text(words)):
        return False
    return number is None or (type(number) is int and 0 <= number <= MAX_CLASS_ID)


def _is_text(value: object) -> bool:
    """Whether the value is a string without lone surrogates, which have no UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
