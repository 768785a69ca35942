"""``prep replay`` and ``prep prove``: what a run delivered, and where two runs diverge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import CommandProgress, Output, fields, json_option
from shardprep.cli.console.runs import (
    TRANSFORM_NAME,
    RunOptions,
    chosen_options,
    load_chosen,
    refuse_typed,
    typed_options,
)
from shardprep.formats.errors import printable
from shardprep.formats.runtime.progress import count_of

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.loader.replay import OrderDifference, Parting, Replayed
    from shardprep.loaders.loader.run_card import RunCard
    from shardprep.loaders.transforms.geometry import ShownPart


SHOWN = 10  # records listed without --records
MEANINGS = {
    "dataset": "they read different datasets",
    "order": "different records",
    "labels": "different labels",
    "columns": "different parts in a batch",
    "augmentation": "different augmentation",
    "pixels": "different values",
}
STEP_OPTIONS = ("epoch", "step", "start", "rank", "listed", "sheet")
DIFF_OPTIONS = ("epochs", "by_pixels")


@command(
    "Show what a rank got at a step, or where two runs diverge.",
    "replay shards/train --card run.json --epoch 3 --step 1207 --sheet step.png",
    "replay shards/train --state checkpoint.json --records",
    "replay shards/train --diff monday.json tuesday.json",
)
@click.argument("dataset", type=options.FOLDER)
@options.file("--card", "FILE", "Run card, from loader.card().save.")
@options.file(
    "--state", "FILE", "State of the loader as JSON, or the run's log; its last step is the default."
)
@options.count("--epoch", "Which epoch.  [default: the state's, or 0]")
@options.count("--step", "Which step, from 0.  [default: the state's last one]")
@options.count(
    "--start", "Place from which steps are counted.  [default: 0, or where the run continued within a step]"
)
@options.count("--rank", "Which rank.  [default: the card's, or 0]", default=0, show_default=False)
@options.count("--world-size", "Number of ranks.  [default: 1]", 1, default=1, show_default=False)
@options.value(
    "--transform", "NAME", "train, eval, none, or package.module:name.", type=TRANSFORM_NAME, default="train"
)
@options.combine_options(*options.LOADER[1:])
@options.count("--seed", "Seed of the order and crops.", default=0)
@click.option("--drop-last/--keep-last", default=True, help="Leave out or keep the last, smaller batch.")
@click.option("--labels", default="sorted_wnid0", help="The label space.")
@options.value("--columns", "NAME,NAME", "Columns in a batch.  [default: all]")
@chosen_options
@options.choice("--gaps", ("close", "keep"), "With --without: the run's gaps.", default="close")
@options.flag("--records", "List all records of the step, not only the first ten.", name="listed")
@options.file("--sheet", "FILE", "Also write a contact sheet of the pixels, .png or .html.")
@options.value(
    "--diff", "A B", "Compare two runs by their cards, states or logs.", nargs=2, type=options.ANY_PATH
)
@options.count("--epochs", "How many epochs --diff compares.", 1, default=1)
@options.flag("--pixels", "With --diff: reproduce the batches, and compare their values.", name="by_pixels")
@options.output
def replay(
    dataset: Path,
    listed: bool,
    sheet: Path | None,
    diff: tuple[Path, Path] | None,
    epochs: int,
    by_pixels: bool,
    progress: CommandProgress,
    **run: Any,
) -> Output:
    """Reproduce what a rank got from DATASET at a step: records, labels, crops and pixels, bit for bit.

    The run is given by a card, a loader's state, a log, or the options. --diff names the first step and
    record at which two runs differ, and why.
    """
    # start-up time: OpenCV
    from shardprep.loaders.loader.replay import ContactSheet, check_suffix
    from shardprep.loaders.loader.run_log import RunLog

    if sum(map(bool, (run["card"], run["state"], diff))) > 1:
        raise click.UsageError("give one of --card, --state and --diff")
    typed = typed_options()
    if "gaps" in typed and "without" not in typed:
        raise click.UsageError("--gaps is only for --without; omit it")
    run_options = RunOptions(dataset, run, typed & run.keys())
    if diff:
        refuse_typed(STEP_OPTIONS, typed, "--diff compares all steps of the ranks of two runs")
        return compare_runs(run_options, diff, epochs, progress, by_pixels=by_pixels)
    refuse_typed(DIFF_OPTIONS, typed, "it is only for --diff")
    if sheet:  # fail before the work rather than after it
        check_suffix(sheet)
    options.check_output_files(sheet)
    file = run["card"] or run["state"]
    recorded = RunLog.load(file) if file else None
    last = recorded.last_entry(run["epoch"], run["start"]) if recorded else None  # gives the defaults
    with run_options.loader(recorded.card_of(last) if recorded else None) as loader:
        epoch, step, start = (run[name] for name in ("epoch", "step", "start"))
        if epoch is None:
            epoch = last.receipt.epoch if last else 0
        if start is None:
            start = last.first if last else 0
        if step is None and (step := last.last_step if last else None) is None:
            undelivered = ": no step of this epoch was delivered" if last else ""
            raise click.UsageError(f"give --step{undelivered}")
        try:
            replayed = loader.replay(epoch, step, start=start, passed=last.passed if last else ())
        except IndexError as error:
            raise click.UsageError(f"epoch {epoch}: {error}") from error
        if sheet:
            ContactSheet(replayed, loader.transform).save(sheet)
        result = {
            "dataset": str(loader.dataset.path),
            "epoch": replayed.epoch,
            "step": replayed.step,
            "start": start,
            "batch": [_describe_part(part) for part in replayed.batch],
            "records": [record.to_json() for record in replayed.records],
            "digests": replayed.digests(),
            "card": loader.card().to_json(),
            "sheet": str(sheet) if sheet else None,
        }
        return Output(result, list(_step_lines(loader, replayed, start, listed=listed, sheet=sheet)))


def _step_lines(
    loader: Loader, replayed: Replayed, start: int, *, listed: bool, sheet: Path | None
) -> Iterator[str]:
    """Yield the form of the batch, and its records, or the first ten unless they are ``listed``."""
    card = loader.card()
    ranks = f", rank {card.rank} of {card.world_size}" if card.world_size > 1 else ""
    records = count_of(len(replayed), "record")
    since = f", counted from place {start:,}" if start else ""
    yield f"{loader.dataset.path}: epoch {replayed.epoch}, step {replayed.step}{ranks}{since}: {records}"
    yield from fields(
        {
            "batch": ", ".join(_format_part(_describe_part(part)) for part in replayed.batch),
            "digest": replayed.digest(),
            "skipped": count_of(len(replayed.skipped), "bad record") if replayed.skipped else None,
            "sheet": sheet,
        }
    )
    shown = replayed.records if listed else replayed.records[:SHOWN]
    yield f"  {'number':>9}{'label':>7}  {'crop':<26}key"
    for record in shown:
        first, *others = record.views or (None,)
        why = f"  skipped: {printable(record.skipped)}" if record.skipped is not None else ""
        yield f"  {record.number:>9}{record.label:>7}  {_format_crop(first):<26}{printable(record.key)}{why}"
        for number, part in enumerate(others, 1):
            yield f"  {f'view {number}':>16}  {_format_crop(part)}"
    if left := len(replayed.records) - len(shown):
        yield f"  and {left:,} more: --records lists them"


def _format_crop(part: ShownPart | None) -> str:
    if part is None:
        return "-"
    x, y, width, height = (f"{side:.6g}" for side in part[:4])
    return f"{width}x{height}+{x}+{y}{' flip' if part.is_mirrored else ''}"


def _describe_part(part: Any) -> dict[str, Any]:
    if isinstance(part, np.ndarray):
        return {"dtype": part.dtype.name, "shape": list(part.shape)}
    if isinstance(part, dict):
        return {"columns": {name: _describe_part(value) for name, value in part.items()}}
    return {"list": len(part)}


def _format_part(form: dict[str, Any]) -> str:
    if "dtype" in form:
        return f"{form['dtype']} {form['shape']}"
    if "list" in form:
        return f"a list of {form['list']}"
    return ", ".join(f"{name} {_format_part(value)}" for name, value in form["columns"].items())


def compare_runs(
    run_options: RunOptions,
    files: tuple[Path, Path],
    epochs: int,
    progress: CommandProgress,
    *,
    by_pixels: bool,
) -> Output:
    """Return where two runs diverge, which of their settings differ, and how their orders do."""
    # start-up time: OpenCV
    from shardprep.loaders.loader.replay import first_parting, order_difference, parting_of_datasets
    from shardprep.loaders.loader.run_card import differences
    from shardprep.loaders.loader.run_log import RunLog

    runs = [RunLog.load(file) for file in files]

    def compare_epochs(
        cards: Sequence[RunCard], epochs: Sequence[int]
    ) -> tuple[Parting | None, OrderDifference | None]:
        if parting := parting_of_datasets(*cards):
            return parting, None
        make = run_options.loader if by_pixels else run_options.ordering_loader
        with make(cards[0]) as left, make(cards[1]) as right:
            both = list(zip((left, right), runs, cards, strict=True))
            one, other = (loader.order_of(card)._replace(passed=run.passed) for loader, run, card in both)
            per_step, counter = max(card.batch_size for card in cards), count(1)
            steps = len(epochs) * max(left.batches_per_epoch, right.batches_per_epoch)

            def differing_row(epoch: int, step: int) -> int | None:
                first, second = (
                    loader.replay(epoch, step, passed=run.passed.get(epoch, ())) for loader, run, _ in both
                )
                return first.first_difference(second)

            with progress.task("comparing", records=steps * per_step, size=0):
                parting = first_parting(
                    one,
                    other,
                    epochs,
                    pixels=differing_row if by_pixels else None,
                    step_done=lambda: progress.at(next(counter) * per_step, 0),
                )
                is_order = parting and parting.kind == "order"
                return parting, order_difference(one, other, epochs) if is_order else None

    def cards_of(epoch: int) -> list[RunCard]:
        return [run.card_of(run.last_entry(epoch) or run.last_entry()) for run in runs]

    for cards, group in groupby(range(epochs), cards_of):  # a run may have continued with other options
        parting, order = compare_epochs(cards, list(group))
        if parting:
            break
    differing = differences(*cards)
    result = {
        "runs": list(map(str, files)),
        "parting": parting.to_json() if parting else None,
        "order": order._asdict() if order else None,
        "settings": {name: list(both) for name, both in differing.items()},
    }
    settings = {name: " | ".join(both) for name, both in differing.items()}
    lines = [f"the runs do not diverge ({count_of(epochs, 'epoch')} compared)"]
    if parting:
        place = f"epoch {parting.epoch}, step {parting.step}, row {parting.row}"
        numbers = " | ".join("none" if number is None else f"{number}" for number in parting.numbers)
        record = None if parting.kind == "dataset" else numbers
        because = {name: " | ".join(both) for name, both in parting.because.items()}
        settings = {name: both for name, both in settings.items() if name not in because}
        lines = [f"the runs diverge at {place}: {MEANINGS[parting.kind]}"]
        lines += fields({"record": record, **because})
    if order:
        lines += fields(
            {
                "steps": f"{order.differing:,} of {order.steps:,} differ",
                "only first": _format_numbers(order.only_first),
                "only second": _format_numbers(order.only_second),
            }
        )
    if settings:
        lines += ["other settings that differ:", *fields(settings)]
    return Output(result, lines)


def _format_numbers(numbers: tuple[int, ...]) -> str | None:
    """Return the count and the first of some record numbers; None without any."""
    if not numbers:
        return None
    more = f" and {len(numbers) - SHOWN:,} more: --json lists them" if len(numbers) > SHOWN else ""
    return f"{count_of(len(numbers), 'record')}: {', '.join(map(str, numbers[:SHOWN]))}{more}"


@command(
    "Prove from its logs what a run delivered.",
    "prove shards/train run.jsonl",
    "prove shards/train rank-*.jsonl --save run.jsonl --key trainer.pem",
    "prove shards/train run.jsonl --signed-by trainer.pub.pem --json",
)
@click.argument("dataset", type=options.FOLDER)
@click.argument("logs", type=options.ANY_PATH, nargs=-1, required=True, metavar="LOG...")
@options.file("--signed-by", "KEY.pub.pem", "Refuse a LOG without its signature.")
@options.file("--save", "FILE", "Write everything that is proven as one log.")
@options.file("--key", "KEY.pem", "With --save: sign it; prep keygen --signing makes keys.")
@chosen_options
@json_option
def prove(
    dataset: Path,
    logs: tuple[Path, ...],
    save: Path | None,
    key: Path | None,
    subset: Path | None,
    without: Path | None,
    **chosen: Any,
) -> Output:
    """Prove from the logs of all ranks of a run that they got each record of DATASET once in each epoch.

    Records that were left out on purpose, cut off or skipped as bad are named.
    A LOG is a file that loader.log_epoch(path) wrote, or a loader's state as JSON.
    """
    from shardprep.loaders.loader.run_log import prove as prove_run  # start-up time: OpenCV

    if key and not save:
        raise click.UsageError("--key signs what --save writes; give --save, too")
    options.check_output_files(save)
    proof = prove_run(dataset, logs, save=save, key=key, **chosen, **load_chosen(subset, without))
    return Output(proof.to_json(), proof.statement.splitlines())
