"""The text and the JSON of ``prep convert --part``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardprep.cli.console.output import print_fields, say
from shardprep.formats import ConvertedPart
from shardprep.formats.system.sizes import count_of, size


def print_part(built: Sequence[ConvertedPart]) -> None:
    """Print what the part has of each split, and what is to do next."""
    for one in built:
        _print_split(one)
    if all(one.already_complete for one in built):
        say("the conversion is finished")
    elif any(one.missing for one in built):
        say("next: when all parts have ended, the same command without --part finishes")
    else:
        say("next: the same command without --part finishes, as soon as no part runs")


def part_for_machines(built: Sequence[ConvertedPart], part: tuple[int, int]) -> dict[str, Any]:
    """Return the result as a JSON object."""
    number, of = part
    return {"part": number, "parts": of, "splits": [_split_for_machines(one) for one in built]}


def _print_split(one: ConvertedPart) -> None:
    number, of = one.part
    state = " (was complete)" if one.already_complete else ""
    say(
        f"{one.path}: part {number} of {of}: {count_of(one.records, 'image')}, {size(one.file_bytes)} "
        f"in {count_of(len(one.shards), 'shard')}{state}"
    )
    fields = {"missing": f"{one.missing:,} of {count_of(one.total, 'shard')}"}
    if one.skipped.count:
        fields["skipped"] = str(one.skipped)
    print_fields(fields)


def _split_for_machines(one: ConvertedPart) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "split": one.split,
        "shards": list(one.shards),
        "records": one.records,
        "file_bytes": one.file_bytes,
        "total_shards": one.total,
        "missing_shards": one.missing,
        "skipped": one.skipped.count,
        "skipped_causes": [asdict(cause) for cause in one.skipped.causes],
        "already_complete": one.already_complete,
    }
