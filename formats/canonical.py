"""One text for one value: the JSON that can be hashed and compared byte for byte."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: object) -> bytes:
    """ASCII, sorted keys, no spaces, no floats from nowhere, one newline at the end."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_canonical_json(data: bytes) -> Any:
    """The value whose canonical text is ``data``; ValueError for every other text.

    Equality with the canonical text refuses duplicate keys, NaN, escapes, floats written as
    integers and white space in one rule.
    """
    try:
        value = json.loads(data)
        canonical = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if canonical != data:
        raise ValueError("not in canonical form")
    return value


def sha256_of(value: object) -> str:
    """``sha256:<hex>`` of a value's canonical JSON."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()
