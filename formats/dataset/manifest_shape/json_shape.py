"""The shape of a value of JSON: the types of its parts, and entries of files."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


def holds(value: object, kinds: dict[str, type]) -> TypeGuard[dict[str, Any]]:
    """Whether the value is a dict that has these keys with values of these types."""
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items())


def has_exactly(value: object, kinds: dict[str, type]) -> TypeGuard[dict[str, Any]]:
    """Whether the value is a dict of these keys and types and no others; numbers are of 63 bits."""
    if not holds(value, kinds) or value.keys() != kinds.keys():
        return False
    return all(0 <= part < 1 << 63 for part in value.values() if type(part) is int)


def file_ok(value: object) -> bool:
    """Whether the value has a file name within the folder, a size, a digest and a count."""
    if not has_exactly(value, {"name": str, "size": int, "sha256": str, "records": int}):
        return False
    return bool(FILE_NAME.fullmatch(value["name"]) and SHA256.fullmatch(value["sha256"]))
