"""``prep repair``: rebuild damaged shards from the source."""

from __future__ import annotations

from pathlib import Path

import click

from shardprep.cli.console.options import ANY_PATH, FOLDER, json_option, workers_option
from shardprep.cli.console.output import TerminalProgress, print_json
from shardprep.formats import repair as repair_dataset

from .verify import print_report


@click.command()
@click.argument("dataset", type=FOLDER)
@click.option("--source", type=ANY_PATH, required=True, help="What the dataset was converted from.")
@click.option("--root", type=FOLDER, help="The folder that the paths of a list of images begin at.")
@workers_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context, dataset: Path, source: Path, root: Path | None, workers: int | None, as_json: bool
) -> None:
    """Rebuild exactly the damaged or missing shards of DATASET; its root stays the same."""
    report = repair_dataset(dataset, source, root=root, workers=workers, progress=TerminalProgress())
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report)
    ctx.exit(report.exit_code)
