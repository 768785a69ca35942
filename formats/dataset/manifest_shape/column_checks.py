"""The checks of the columns in a manifest: their shape, and what must agree between them."""

from __future__ import annotations

import re
from typing import Any

from shardprep.formats.columns.column_entry import DatasetColumns, shard_name, table_name
from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.errors import UsageError

from .json_shape import file_ok, has_exactly, holds

ROOT = re.compile(r"blake3:[0-9a-f]{64}")


def columns_ok(value: object) -> bool:
    """Whether the value is the part "columns" of a manifest, with a schema that this release knows."""
    if not has_exactly(value, {"fields": list, "records_root": str, "has_images": bool}):
        return False
    fields = value["fields"]
    if not fields or not ROOT.fullmatch(value["records_root"]) or not all(map(_column_ok, fields)):
        return False
    try:
        Schema(Field.from_json(each) for each in fields)
    except UsageError:
        return False
    return True


def _column_ok(value: object) -> bool:
    if not holds(value, {"name": str, "kind": str, "table": dict, "shards": list, "content_root": str}):
        return False
    classes = value.get("classes", [])
    known = {"name", "kind", "table", "shards", "content_root", "classes"}
    return (
        value.keys() <= known
        and isinstance(classes, list)
        and ("classes" in value) == bool(classes)
        and all(isinstance(name, str) for name in classes)
        and bool(ROOT.fullmatch(value["content_root"]))
        and file_ok(value["table"])
        and all(map(file_ok, value["shards"]))
    )


def column_issues(value: dict[str, Any]) -> list[str]:
    """Return what does not agree between the columns of a manifest and its other parts."""
    columns, issues = DatasetColumns.from_json(value["columns"]), []
    records = [shard["records"] for shard in value["shards"]]
    for entry in columns.entries:
        name = entry.field.name
        wanted = [] if entry.field.is_fixed else records
        shards = [shard_name(name, number, value["container"]) for number in range(len(wanted))]
        is_named = entry.table.name == table_name(name) and [s.name for s in entry.shards] == shards
        if not is_named or [shard.records for shard in entry.shards] != wanted:
            issues.append(f"the files of the column {name} are not those of its shards")
        if entry.table.records != value["dataset"]["records"]:
            issues.append(f"the column {name} has {entry.table.records} rows")
    if columns.content_root != value["content_root"]:
        issues.append("the content_root is not that of the columns")
    if not columns.has_images and value["dataset"]["image_bytes"]:
        issues.append("it has images, and says that it has none")
    return issues
