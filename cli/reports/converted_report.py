"""What ``prep convert`` and ``prep index`` say about what they made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardprep.cli.console.output import print_fields, print_json, say, say_next
from shardprep.formats import Converted, ConvertedTo
from shardprep.formats.system.sizes import count_of, size

from .dry_run_report import ignored_text


def show_converted(done: Sequence[Converted | ConvertedTo], output: Path | str, *, as_json: bool) -> None:
    """Print what a conversion made, and the next command."""
    for converted in done:
        _warn(converted)
    if as_json:
        print_json({"splits": [_for_machines(d) for d in done]})
    else:
        for converted in done:
            _print(converted)
        _say_next(done, output)


def _say_next(done: Sequence[Converted | ConvertedTo], output: Path | str) -> None:
    if isinstance(output, str):
        say_next("fetch", output, "COPY")
    else:
        say_next("bench-loader" if all(each.already_complete for each in done) else "verify", output)


def _place_of(done: Converted | ConvertedTo) -> str:
    return done.url if isinstance(done, ConvertedTo) else str(done.path)


def _for_machines(done: Converted | ConvertedTo) -> dict[str, Any]:
    manifest = done.manifest
    return {
        **({"url": done.url} if isinstance(done, ConvertedTo) else {"path": str(done.path)}),
        "split": manifest.split,
        "layout": manifest.source["layout"],
        "records": manifest.records,
        "image_bytes": manifest.image_bytes,
        "shards": len(manifest.shards),
        "skipped": manifest.skipped,
        "skipped_causes": [asdict(cause) for cause in done.skipped.causes],
        "emptied_classes": list(done.skipped.emptied),
        "partial": manifest.partial,
        "ignored": dict(done.ignored),
        "already_complete": done.already_complete,
        "content_root": manifest.content_root,
        "root": manifest.root,
    }


def _warn(done: Converted | ConvertedTo) -> None:
    """Name the classes that lost all their images; they keep their labels."""
    if emptied := done.skipped.emptied:
        these = f"no image of {'this class' if len(emptied) == 1 else 'these classes'} is left"
        say(f"warning: {_place_of(done)}: {these}, all were skipped: {', '.join(emptied)}", err=True)


def _print(done: Converted | ConvertedTo) -> None:
    manifest = done.manifest
    kind = "table" if manifest.archive else f"{manifest.container.upper()} shard"
    shards = count_of(len(manifest.shards), kind)
    state = " (was complete, and is intact)" if done.already_complete else ""
    classes = count_of(len(manifest.labels), "class")
    say(
        f"{_place_of(done)}: {count_of(manifest.records, 'image')}, {classes}, {size(manifest.image_bytes)} "
        f"in {'place, ' if manifest.archive else ''}{shards}{state}"
    )
    shown = {"source": manifest.source["layout"]}
    if manifest.skipped:
        shown["skipped"] = f"{done.skipped}; listed in quarantine.json"
    if done.ignored:
        shown["ignored"] = ignored_text(done.ignored)
    if manifest.partial:
        shown["partial"] = "the source did not hold all images that it should"
    print_fields(shown | {"content_root": manifest.content_root, "root": manifest.root})
