"""``prep replay``: what a rank got at a step of a run, and where two runs part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    OPTIONS,
    check_replaced,
    examples,
    json_option,
    progress_option,
)
from shardprep.cli.console.output import print_json
from shardprep.cli.console.progress import Form
from shardprep.cli.console.runs import RunOptions, TransformName, given_options, refuse_typed
from shardprep.cli.reports.parting_report import RunComparison, print_parting
from shardprep.cli.reports.replay_report import print_replayed, replayed_json

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders import Loader
    from shardprep.loaders.loader.replaying.recorded_run import RecordedRun
    from shardprep.loaders.loader.replaying.replayed import Replayed

OF_ONE_STEP = {
    "epoch": "--epoch",
    "step": "--step",
    "start": "--start",
    "rank": "--rank",
    "listed": "--records",
    "sheet": "--sheet",
}
OF_TWO_RUNS = {"epochs": "--epochs", "by_pixels": "--pixels"}
COUNT = click.IntRange(min=0)
RUN_OPTIONS = (
    click.option("--card", type=ANY_PATH, metavar="FILE", help="The run's card, by loader.card().save."),
    click.option(
        "--state", type=ANY_PATH, metavar="FILE", help="A state of its loader, as JSON; its last step."
    ),
    click.option("--epoch", type=COUNT, help="Which epoch.  [default: the state's, or 0]"),
    click.option("--step", type=COUNT, help="Which step, from 0.  [default: the state's last one]"),
    click.option("--start", type=COUNT, help="The place where a resumed epoch began.  [default: the state's]"),
    click.option("--rank", type=COUNT, default=0, help="Which rank.  [default: the card's, or 0]"),
    click.option("--world-size", type=click.IntRange(min=1), default=1, help="Number of ranks.  [default: 1]"),
    click.option(
        "--transform",
        type=TransformName(),
        default="train",
        show_default=True,
        metavar="NAME",
        help="train, eval, none, or package.module:name.",
    ),
    *OPTIONS[1:],
    click.option("--seed", type=COUNT, default=0, show_default=True, help="Of the order and crops."),
    click.option(
        "--drop-last/--keep-last", default=True, show_default=True, help="Whether a last short batch is left out."
    ),
    click.option("--labels", default="sorted_wnid0", show_default=True, help="The label space."),
    click.option("--columns", metavar="NAME,NAME", help="The columns in a batch.  [default: all]"),
    click.option(
        "--subset", type=ANY_PATH, metavar="FILE.npy", help="The records that were chosen: numbers or a mask."
    ),
)  # fmt: skip


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a run to a command; it gets them as ``run``, by name."""
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command


@click.command(
    short_help="Show what a rank got at a step; or where two runs part.",
    epilog=examples(
        "replay shards/train --card run.json --epoch 3 --step 1207 --sheet step.png",
        "replay shards/train --state checkpoint.json --records",
        "replay shards/train --diff monday.json tuesday.json",
    ),
)
@click.argument("dataset", type=FOLDER)
@run_options
@click.option("--records", "listed", is_flag=True, help="List all records of the step, not the first ten.")
@click.option(
    "--sheet", type=ANY_PATH, metavar="FILE", help="Also write a contact sheet of the pixels, .png or .html."
)
@click.option(
    "--diff", nargs=2, type=ANY_PATH, metavar="A B", help="Compare two runs, by their cards or states."
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many epochs --diff compares.",
)
@click.option(
    "--pixels", "by_pixels", is_flag=True, help="--diff makes the batches, and compares their values."
)
@progress_option
@json_option
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    dataset: Path,
    listed: bool,
    sheet: Path | None,
    diff: tuple[Path, Path] | None,
    epochs: int,
    by_pixels: bool,
    form: Form,
    as_json: bool,
    **run: Any,
) -> None:
    """Make again what a rank got from DATASET at a step: records, labels, crops and pixels, bit for bit.

    The run is that of a card, of a loader's state, or of the options. --diff names the first step and
    record at which two runs differ, and why.
    """
    from shardprep.loaders.loader.replaying.recorded_run import RecordedRun  # start-up time: OpenCV

    if sum(map(bool, (run["card"], run["state"], diff))) > 1:
        raise click.UsageError("give one of --card, --state and --diff")
    typed = given_options(ctx, ctx.params)
    options = RunOptions(dataset, run, typed & run.keys())
    if diff:
        refuse_typed(OF_ONE_STEP, typed, "--diff compares all steps of the ranks of two runs")
        cards = (RecordedRun.load(diff[0]).card, RecordedRun.load(diff[1]).card)
        comparison = RunComparison(options, cards, epochs, by_pixels)
        print_parting(comparison, comparison.parting(form), diff, as_json=as_json)
        return
    refuse_typed(OF_TWO_RUNS, typed, "it is for the two runs that --diff compares")
    if sheet:
        _check_sheet(sheet)
    file = run["card"] or run["state"]
    recorded = RecordedRun.load(file) if file else None
    with options.loader(recorded.card if recorded else None) as loader:
        epoch, step, start = _place(run, recorded)
        made = _replayed(loader, epoch, step, start)
        if sheet:
            _save_sheet(made, loader, sheet)
        if as_json:
            print_json(replayed_json(loader, made, start) | {"sheet": str(sheet) if sheet else None})
        else:
            print_replayed(loader, made, listed=listed, sheet=sheet)


def _replayed(loader: Loader, epoch: int, step: int, start: int) -> Replayed:
    try:
        return loader.replay(epoch, step, start=start)
    except IndexError as error:
        raise click.UsageError(f"the epoch has no {error}; steps are counted from 0") from error


def _check_sheet(file: Path) -> None:
    """Raise, before the work begins, what writing the sheet would raise."""
    from shardprep.loaders.loader.replaying.sheet import check_suffix  # start-up time: OpenCV

    check_suffix(file)
    check_replaced(file)


def _save_sheet(made: Replayed, loader: Loader, file: Path) -> None:
    from shardprep.loaders.loader.replaying.sheet import ContactSheet  # start-up time: OpenCV

    ContactSheet(made, loader.transform).save(file)


def _place(run: dict[str, Any], recorded: RecordedRun | None) -> tuple[int, int, int]:
    """The epoch, the step and the start that were asked for; by default those of the state."""
    place = recorded.place if recorded else None
    epoch = run["epoch"] if run["epoch"] is not None else place.epoch if place else 0
    is_same = place is not None and place.epoch == epoch
    start, step = run["start"], run["step"]
    if start is None:
        start = place.start if place and is_same else 0
    if step is None and place and recorded and is_same:
        step = place.last_step(recorded.card)
    if step is None:
        why = ": no step of this epoch was delivered before the state" if is_same else ""
        raise click.UsageError(f"give --step{why}")
    return epoch, step, start
