"""``prep report`` shows what is in a dataset, ``prep gate`` limits it, ``prep find`` looks for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import Output, for_each_dataset
from shardprep.cli.console.runs import RunOptions, chosen_options, refuse_typed, typed_options
from shardprep.formats.errors import printable
from shardprep.formats.reports.examine import PIXELS, report as report_dataset
from shardprep.formats.reports.find import ImageMatch, find as find_images
from shardprep.formats.reports.gate import KINDS, GateResult, Limit, gate as gate_dataset, read_limits
from shardprep.formats.runtime.files import name_in_data_errors
from shardprep.formats.runtime.json_record import read_json_file
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.dataset import splits_of

SHOWN_SIGHTINGS = 10  # printed times that a run saw a record
DATASET_OPTIONS = ("against", "pixels", "classes", "record", "seed", "save_findings", "workers")


@command(
    "Write a page that shows what is in a dataset.",
    "report shards/train --against shards/val -o leaks.html",
    "report shards/train --pixels all --class n01440764 --json",
    "report --run stats.json --disk profile.json -o run.html",
)
@click.argument("dataset", type=options.FOLDER, required=False)
@click.option(
    "-o", "--output", type=options.ANY_PATH, default="report.html", help="Page to write or replace."
)
@click.option(
    "--against",
    type=options.FOLDER,
    help="Compare with this dataset: shared images, and the balance of classes.",
)
@options.choice("--pixels", PIXELS, "Which images are read; a sample is up to 4,096.", default="sample")
@options.value(
    "--class", "NAME", "Show many images of this class; repeatable.", name="classes", multiple=True
)
@options.value("--record", "KEY", "Show the hashes that link this record to the root.")
@options.count("--seed", "Seed of the sample.", default=0)
@options.file(
    "--save-findings", "FILE.json", "Also write the numbers of all records to leave out, by finding."
)
@options.file(
    "--run",
    "STATS.json",
    "In place of a dataset: the stats of a run, or the output of prep bench-loader --json.",
)
@options.file("--trace", "FILE.json", "With --run: a trace, shown as a timeline.")
@options.file("--disk", "PROFILE.json", "With --run: a disk profile from prep bench-disk --save.")
@options.work
def report(
    dataset: Path | None,
    output: Path,
    record: str | None,
    save_findings: Path | None,
    run: Path | None,
    trace: Path | None,
    disk: Path | None,
    **chosen: Any,
) -> Output:
    """Write a page of HTML that shows what is in DATASET, or in each split in that folder.

    It has counts, sizes, pictures, duplicates, images that may be mislabelled, and oddities. The page is one
    file, which loads nothing and runs no scripts. In a folder of splits, each split gets a page, such as
    report-train.html.
    """
    options.check_output_files(output, save_findings)
    if run and dataset is None:
        refuse_typed(DATASET_OPTIONS, typed_options(), "for a DATASET, not for a run")
        from shardprep.loaders.engine.trace import LARGEST_TRACE
        from shardprep.loaders.loader.run_page import run_page, save_page
        from shardprep.loaders.measuring.disk import DiskProfile  # start-up time

        profile = DiskProfile.load(disk).to_json() if disk else None
        traced = read_json_file(trace, most=LARGEST_TRACE) if trace else None
        values = read_json_file(run)
        with name_in_data_errors(run):
            text = run_page(values, name=run.stem, disk=profile, trace=traced)
        save_page(text, output)
        return Output({"page": str(output)}, [f"{output}: the run in {run}"])
    if dataset is None or run or trace or disk:
        raise click.UsageError("give a DATASET, or --run STATS.json, optionally with --trace and --disk")
    if record is not None and splits_of(dataset):
        raise click.UsageError(f"{dataset} is a folder of splits; --record needs one of them")

    def examine_one(place: Path) -> Output:
        page = output_file(output, place, dataset)
        other = other_than(place, dataset, chosen["against"])
        examination = report_dataset(place, page, record=record, **chosen | {"against": other})
        found = examination.to_json()
        looked = found["looked_at"]
        if looked["pixels"] == "none":
            seen = "the index only"
        elif not looked["images"]:
            seen = "records without images"
        else:
            seen = f"{looked['decoded']:,} of {count_of(looked['images'], 'image')} examined"
        lines = [f"{page}: {found['dataset']['path']}, {seen}"]
        for each in found["observations"]:
            least = "at least " if each["is_partial"] else ""
            lines.append(f"  {each['title']}: {least}{count_of(each['count'], each['what'])}")
        if save_findings:
            numbers = output_file(save_findings, place, dataset)
            examination.save_findings(numbers)
            lines.append(f"  record numbers: {numbers}")
        return Output({"page": str(page)} | found, lines)

    return for_each_dataset(dataset, examine_one, lambda results: f"{count_of(len(results), 'page')} written")


def other_than(place: Path, folder: Path, against: Path | None) -> Path | None:
    """Return the dataset to compare with; None for the split in the folder that is this dataset itself."""
    return None if against and place != folder and place.resolve() == against.resolve() else against


def output_file(file: Path, dataset: Path | str, folder: Path | str) -> Path:
    """Return the output file for a dataset; for a split in the folder, the split's name is added to it."""
    return file if dataset == folder else file.with_name(f"{file.stem}-{Path(dataset).name}{file.suffix}")


def _parse_limit(text: str) -> Limit:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of records nor a share of them") from None


LIMIT = options.ParsedParam("number", _parse_limit)
NAMED_LIMITS = {
    "leaks": "Images equal or similar to one in the --against dataset.  [default: 0 with --against]",
    "duplicates": "Images with the same bytes as an earlier one.",
    "mislabelled": "Equal or similar images with different labels.",
    "similar": "Images that look like an earlier one.",
    "damaged": "Images that cannot be read or decoded.  [default: 0]",
}
limit_options = options.combine_options(
    *(options.value(f"--max-{name}", "N", words, type=LIMIT) for name, words in NAMED_LIMITS.items())
)


def _parse_limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Limit]:
    limits = {}
    for value in values:
        name, equals, limit = value.partition("=")
        if not equals or name not in KINDS:
            raise click.BadParameter(f"{value!r} is not NAME=N; names are {', '.join(KINDS)}")
        limits[name] = LIMIT.convert(limit, param, ctx)
    return limits


@command(
    "Fail if datasets have more faults than allowed.",
    "gate shards/train --against shards/val --max-leaks 0 --max-duplicates 0.001",
    "gate shards/train --limits gate.toml --junit gate.xml",
)
@click.argument("dataset", type=options.FOLDER)
@click.option("--against", type=options.FOLDER, help="A dataset whose images must not be in this one.")
@options.value("--root", "SHA256", "The root that the dataset must have.")
@options.flag("--canaries", "Fail if this machine decodes or resizes images to different pixels.")
@limit_options
@options.value(
    "--max",
    "NAME=N",
    "A limit by name, such as empty-classes=0 or cmyk=10; repeatable.",
    name="others",
    multiple=True,
    callback=_parse_limits,
)
@options.file("--limits", "FILE.toml", "A root, and a table [max].", name="file")
@options.file("--junit", "FILE.xml", "Also write the checks as JUnit's XML.")
@options.choice(
    "--pixels",
    PIXELS[1:],
    "Which images are read, if a limit needs them; a sample is up to 4,096.",
    default="all",
)
@options.work
def gate(
    dataset: Path,
    against: Path | None,
    root: str | None,
    others: dict[str, Limit],
    file: Path | None,
    junit: Path | None,
    **chosen: Any,
) -> Output:
    """Check DATASET, or each split in that folder, against limits, and exit with 1 if one is exceeded.

    N is a number of records, or below 1 a share of them, such as 0.001. A limit on the command line replaces
    that of the file.
    """
    options.check_output_files(junit)
    file_root, limits = read_limits(file) if file else (None, {})
    named = {name: limit for name in NAMED_LIMITS if (limit := chosen.pop(f"max_{name}")) is not None}
    limits = {"damaged": 0} | limits | others | named
    root = root or file_root
    if root is not None and splits_of(dataset):
        raise click.UsageError(
            f"{dataset} is a folder of splits; each has a root of its own: give one of them"
        )

    def gate_one(place: Path) -> Output:
        other = other_than(place, dataset, against)
        own = {name: limit for name, limit in limits.items() if name != "leaks" or other == against}
        result = gate_dataset(place, own, root=root, against=other, **chosen)
        if junit is not None:
            result.save_junit(output_file(junit, place, dataset))
        return Output(result.to_json(), _gate_lines(result), 0 if result.passed else 1, result)

    return for_each_dataset(
        dataset,
        gate_one,
        lambda results: f"{sum(r.passed for r in results.values())} of {len(results)} passed",
    )


def _gate_lines(result: GateResult) -> Iterator[str]:
    seen = f", {count_of(result.looked_at, 'image')} examined" if result.looked_at else ""
    yield f"{result.dataset}: {count_of(result.records, 'record')}{seen}"
    for check in result.checks:
        yield f"  {'pass' if check.passed else 'FAIL'}  {check.name:<18}{check}"
        for line in () if check.passed else check.named():
            yield f"        {'':<18}{line}"


@command(
    "Look for pictures in datasets.",
    "find shards/train photo.jpg",
    "find shards/train *.jpg --near --hashes train.hashes --run run.jsonl",
)
@click.argument("dataset", type=options.FOLDER)
@click.argument("images", type=options.ANY_PATH, nargs=-1, required=True, metavar="IMAGE...")
@options.flag("--near", "Also find images scaled, compressed again, turned or mirrored; reads all images.")
@options.file("--hashes", "FILE", "With --near: keep the hashes in this file for the next time.")
@options.file("--run", "FILE", "The log, card or state of a run: also list when it saw the pictures.")
@options.count(
    "--epochs", "With --run: how many epochs it had.  [default: those of the log or state, or 1]", 1
)
@chosen_options
@options.work
def find(
    dataset: Path,
    images: tuple[Path, ...],
    near: bool,
    hashes: Path | None,
    run: Path | None,
    epochs: int | None,
    subset: Path | None,
    without: Path | None,
    **chosen: Any,
) -> Output:
    """Find the records of DATASET, or of each split or part in it, that show the pictures IMAGE.

    A record matches if it has the picture's bytes, or if a conversion made one from the other; with --near,
    also if it looks alike.
    """
    if run is not None and splits_of(dataset):
        raise click.UsageError(f"{dataset} is a folder of splits; --run needs one of them")
    if run is None:
        refuse_typed(("epochs", "subset", "without"), typed_options(), "it is only for --run")
    options.check_output_files(hashes)
    for image in images:  # a missing one is an error once, not for each split
        image.stat()
    log, order, firsts = None, None, dict[Path, int]()
    if run is not None:  # refused before the work if it is on another dataset, or too long
        from shardprep.loaders.loader.run_log import RunLog  # start-up time: OpenCV

        log = RunLog.load(run)
        epochs = epochs or log.count_epochs()
        run_options = RunOptions(dataset, {"subset": subset, "without": without}, set())
        with run_options.ordering_loader(log.card) as loader:
            order = loader.order_of()
            firsts = {part.folder.resolve(): part.first_record for part in loader.dataset.parts}

    def search_one(place: Path) -> Output:
        hash_file = output_file(hashes, place, dataset) if hashes else None
        found = find_images(place, images, near=near, hashes=hash_file, **chosen)
        first = firsts.get(place.resolve(), 0)  # of a part of a collection
        seen: dict[int, list[dict[str, int | None]]] = {first + match.record: [] for match in found}
        for sighting in log.sightings(order, seen, epochs) if log and order and epochs else ():
            at = sighting._asdict()
            seen[at.pop("number")].append(at)
        listed, missing, lines = [], [], [f"{place}: {count_of(len(found), 'record')} found"]
        for image in dict.fromkeys(map(str, images)):
            matches = [match for match in found if match.image == image]
            missing += [] if matches else [image]
            lines.append(f"  {printable(image)}{'' if matches else ': not found'}")
            for match in matches:
                lines.append(f"    {_format_match(match)}")
                listed.append(match.to_json())
                if log is None:
                    continue
                listed[-1]["seen"] = steps = seen[first + match.record]
                lines += [f"      {_format_sighting(step)}" for step in steps[:SHOWN_SIGHTINGS]]
                if len(steps) > SHOWN_SIGHTINGS:
                    lines.append(f"      and {len(steps) - SHOWN_SIGHTINGS:,} more: --json lists them")
                elif not steps:
                    lines.append("      never seen by the run")
        if missing and not near:
            lines.append("  --near also finds copies scaled, compressed again, turned or mirrored")
        return Output(
            {"dataset": str(place), "found": listed, "not_found": missing}, lines, result=len(found)
        )

    return for_each_dataset(
        dataset,
        search_one,
        lambda results: f"{count_of(sum(results.values()), 'record')} found",
        by_part=True,
    )


def _format_match(match: ImageMatch) -> str:
    alike = f"looks alike, {count_of(match.distance or 0, 'bit')} differ"
    of = f" of {printable(match.class_name)}" if match.class_name else ""
    how = "the same image" if match.distance is None else alike
    return f"record {match.record:,}{of}: {printable(match.key)} ({how})"


def _format_sighting(at: Mapping[str, int | None]) -> str:
    if at["step"] is None:
        return f"epoch {at['epoch']}, at a step before those in the log"
    since = f", counted from place {at['start']:,}" if at["start"] else ""
    return f"epoch {at['epoch']}, step {at['step']:,}, rank {at['rank']}{since}"
