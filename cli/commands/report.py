"""``prep report``: a page that shows what is in a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    DatasetWork,
    check_replaced,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.console.runs import typed_options
from shardprep.formats.errors import DataError
from shardprep.formats.reports.examine import report as report_dataset
from shardprep.formats.reports.observations import PIXELS
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.shards.dataset import splits_of

OF_A_DATASET = {
    "against": "--against",
    "pixels": "--pixels",
    "classes": "--class",
    "record": "--record",
    "seed": "--seed",
    "save_findings": "--save-findings",
    "workers": "--workers",
}
LARGEST_TRACE = 256 << 20  # bytes; a loader keeps 200,000 spans, in about 100 MB


@click.command(
    short_help="Write a page that shows what is in a dataset.",
    epilog=examples(
        "report shards/train --against shards/val -o leaks.html",
        "report shards/train --pixels all --class n01440764 --json",
        "report --run stats.json --disk profile.json -o run.html",
    ),
)
@click.argument("dataset", type=FOLDER, required=False)
@click.option("-o", "--output", type=ANY_PATH, default="report.html", help="The page, replaced.")
@click.option(
    "--against", type=FOLDER, help="Compare with this dataset: shared images, and the balance of classes."
)
@click.option(
    "--pixels",
    type=click.Choice(PIXELS),
    default="sample",
    help="Which images are read; a sample is up to 4,096.",
)
@click.option(
    "--class", "classes", multiple=True, metavar="NAME", help="Show many images of this class; repeatable."
)
@click.option("--record", metavar="KEY", help="Show how this record is proved, from its bytes to the root.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Chooses the sample.")
@click.option(
    "--save-findings",
    type=ANY_PATH,
    metavar="FILE.json",
    help="Also write the numbers of all records to leave out, by finding.",
)
@click.option(
    "--run",
    type=ANY_PATH,
    metavar="STATS.json",
    help="In place of a dataset: the stats of a run, or the output of prep bench-loader --json.",
)
@click.option("--trace", type=ANY_PATH, metavar="FILE.json", help="With --run: a trace, shown as a timeline.")
@click.option(
    "--disk",
    type=ANY_PATH,
    metavar="PROFILE.json",
    help="With --run: a disk profile from prep bench-disk --save.",
)
@workers_option
@progress_option
@json_option
@click.pass_context
def report(
    ctx: click.Context,
    /,
    dataset: Path | None,
    output: Path,
    record: str | None,
    save_findings: Path | None,
    run: Path | None,
    trace: Path | None,
    disk: Path | None,
    form: Form,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Write a page of HTML that shows what is in DATASET, or in each split in that folder.

    It has counts, sizes, pictures, duplicates, suspects of a wrong label, and oddities. The page is one file,
    which loads nothing and runs no program. Of a folder of splits each has a page, such as report-train.html.
    """
    check_replaced(output)
    check_replaced(save_findings)
    if (dataset is None) == (run is None) or (run is None and (trace or disk)):
        raise click.UsageError(
            "give a DATASET, or --run STATS.json with --trace and --disk where there are some"
        )
    if run and (typed := typed_options(ctx) & OF_A_DATASET.keys()):
        raise click.UsageError(f"{OF_A_DATASET[min(typed)]} is for a DATASET, not for a run")
    if dataset is None:
        report_run(run or Path(), output, trace=trace, disk=disk, as_json=as_json)
        return
    has_splits = bool(splits_of(dataset))
    if record is not None and has_splits:
        raise click.UsageError(f"{dataset} is a folder of splits; --record needs one of them")

    def examined(place: Path) -> Examined:
        page = file_of(output, place, has_splits)
        found = report_dataset(place, page, record=record, progress=progress_in(form), **chosen)
        findings = file_of(save_findings, place, has_splits) if save_findings else None
        if findings:
            found.save_findings(findings)
        return Examined(page, findings, found.to_json())

    work = DatasetWork(
        examined,
        print_examined,
        lambda done: {"page": str(done.page)} | done.found,
        lambda results: f"{count_of(len(results), 'page')} written",
    )
    ctx.exit(work.run(dataset, as_json=as_json))


def file_of(file: Path, dataset: Path, has_splits: bool) -> Path:
    """Return the file of a dataset's page or findings; with splits its name has that of the split."""
    return file.with_name(f"{file.stem}-{dataset.name}{file.suffix}") if has_splits else file


class Examined(NamedTuple):
    """What was ``found`` in a dataset, in JSON's values, and the files that were written."""

    page: Path
    findings: Path | None
    found: dict[str, Any]


def print_examined(done: Examined) -> None:
    """Print what was looked at, the observations, and the files."""
    looked = done.found["looked_at"]
    if looked["pixels"] == "none":
        seen = "the index only"
    elif not looked["images"]:
        seen = "records without images"
    else:
        seen = f"{looked['decoded']:,} of {count_of(looked['images'], 'image')} looked at"
    say(f"{done.page}: {done.found['dataset']['path']}, {seen}")
    for one in done.found["observations"]:
        least = "at least " if one["is_partial"] else ""
        say(f"  {one['title']}: {least}{count_of(one['count'], one['what'])}")
    if done.findings:
        say(f"  record numbers: {done.findings}")


def report_run(run: Path, output: Path, *, trace: Path | None, disk: Path | None, as_json: bool) -> None:
    """Write the page of a run of a loader, from the file of its stats."""
    from shardprep.loaders.loader.run_page import json_of, run_page, save_page
    from shardprep.loaders.measuring.disk_profile import DiskProfile  # start-up time

    profile = DiskProfile.load(disk).to_json() if disk else None
    traced = json_of(trace, most=LARGEST_TRACE) if trace else None
    values = json_of(run)
    try:
        text = run_page(values, name=run.stem, disk=profile, trace=traced)
    except DataError as error:
        raise DataError(error.message, path=error.path or run) from error
    save_page(text, output)
    say(json.dumps({"page": str(output)}) if as_json else f"{output}: the run in {run}")
