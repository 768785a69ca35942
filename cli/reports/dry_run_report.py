"""The text of ``prep convert --dry-run``."""

from __future__ import annotations

from collections.abc import Mapping

from shardprep.cli.console.output import print_fields, say
from shardprep.formats import DryRun, PlannedSplit
from shardprep.formats.system.sizes import count_of, size


def print_dry_run(planned: DryRun) -> None:
    """Print each split, the problems, and the time to expect."""
    for split in planned.splits:
        _print_split(split)
    for problem in planned.skipped:
        say(f"skipped: {problem}")
    for problem in planned.problems:
        say(f"problem: {problem}")
    if planned.seconds is not None and planned.read_rate is not None:
        workers = count_of(max(1, planned.workers), "process")
        say(
            f"time: about {_duration(planned.seconds)} with {workers}: reading at {size(planned.read_rate)}/s, "
            "as in this run, and hashing, by a sample; writing is not measured"
        )
    found = len([*planned.problems])
    state = f"the conversion would fail: {count_of(found, 'problem')}" if found else "no problems"
    say(f"dry run: {state}; nothing was written")


def ignored_text(ignored: Mapping[str, int]) -> str:
    """Return the names of files that were left out of a source, with their numbers."""
    return ", ".join(f"{number} {name}" for name, number in sorted(ignored.items()))


def _print_split(split: PlannedSplit) -> None:
    shards = count_of(split.shards, f"{split.container.upper()} shard")
    state = " (is complete already)" if split.already_complete else ""
    say(
        f"{split.path}: {count_of(split.images, 'image')}, {count_of(split.classes, 'class')}, "
        f"{size(split.image_bytes)} in {shards}{state}"
    )
    fields = {"source": split.layout, "disk": f"at most {size(split.disk_bytes)}"}
    if split.columns:
        fields["columns"] = ", ".join(f"{name} ({kind})" for name, kind in split.columns.items())
    if split.skipped:
        fields["skipped"] = f"{count_of(split.skipped, 'bad image')} would be left out"
    if split.ignored:
        fields["ignored"] = ignored_text(split.ignored)
    print_fields(fields)


def _duration(seconds: float) -> str:
    """Return a time in two units at most.

    >>> _duration(0.2), _duration(75), _duration(7500)
    ('1 s', '1 min 15 s', '2 h 5 min')
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
