"""Canonical JSON: one text for each value, fit for hashing; and checks of the shape of parsed values."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, TypeGuard

# Lists, objects and their elements: each takes some 200 bytes of memory, and 2 bytes of a file. A list of
# shards or classes in a file of 64 MiB has fewer, because an entry has at least 100 bytes.
MOST_PARTS = 2_500_000


def canonical_json(value: object) -> bytes:
    """Return a value as ASCII JSON: sorted keys, no spaces, no NaN or infinity, a newline at the end."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_canonical_json(data: bytes) -> Any:
    """Return the value of the canonical text ``data``. Raises ValueError for any other text.

    The comparison with the canonical text refuses duplicate keys, NaN, other escapes, other forms of numbers
    and white space in one rule. Memory is bounded: more parts than MOST_PARTS are a ValueError.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MOST_PARTS:
        raise ValueError(f"has more than {MOST_PARTS} parts")
    try:
        value = json.loads(data.decode("ascii"))
        is_canonical = canonical_json(value) == data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not is_canonical:
        raise ValueError("not in canonical form")
    return value


def sha256_of(value: object) -> str:
    """Return ``sha256:<hex>`` of a value's canonical JSON."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


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
