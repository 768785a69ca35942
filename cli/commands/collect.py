"""``prep collect``: list finished datasets as one collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import ANY_PATH, FOLDER, examples, json_option
from shardprep.cli.console.output import print_fields, print_json, say, say_next
from shardprep.formats import Collection
from shardprep.formats import collect as collect_parts
from shardprep.formats.system.sizes import count_of


@click.command(
    short_help="List finished datasets as one, to train on all of them.",
    epilog=examples(
        "collect all shards/train shards/val",
        "collect all shards/train shards/val --json",
    ),
)
@click.argument("out", type=ANY_PATH)
@click.argument("parts", type=FOLDER, nargs=-1, required=True)
@json_option
def collect(out: Path, parts: tuple[Path, ...], as_json: bool) -> None:
    """Make the folder OUT with a collection of the datasets PARTS, in this order.

    Nothing is copied: OUT gets a file of names and roots. The parts must have the same classes and columns. A
    Loader reads OUT as one dataset, with its records numbered over all parts.
    """
    with collect_parts(out, parts) as made:
        if as_json:
            print_json(_for_machines(made))
            return
        say(f"{out}: {count_of(len(made), 'record')} in {count_of(len(made.parts), 'part')}")
        fields = {part.name: count_of(part.manifest.records, "record") for part in made.parts}
        print_fields(fields | {"root": made.root})
        say_next("verify", out)


def _for_machines(made: Collection) -> dict[str, Any]:
    parts = [
        {
            "name": part.name,
            "path": str(part.folder),
            "records": part.manifest.records,
            "root": part.manifest.root,
        }
        for part in made.parts
    ]
    return {"path": str(made.path), "records": len(made), "parts": parts, "root": made.root}
