"""What ``prep replay`` says about a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardprep.cli.console.output import print_fields, say
from shardprep.formats.printable import printable
from shardprep.formats.system.sizes import count_of

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders import Loader
    from shardprep.loaders.loader.replaying.replayed import Replayed, ReplayedRecord

FIRST = 10  # records that are listed without --records


def replayed_json(loader: Loader, made: Replayed, start: int) -> dict[str, Any]:
    """Return the step as a JSON object."""
    return {
        "dataset": str(loader.dataset.path),
        "epoch": made.epoch,
        "step": made.step,
        "start": start,
        "batch": [_form(part) for part in made.batch],
        "records": [record.to_json() for record in made.records],
        "digests": made.digests(),
        "card": loader.card().to_json(),
    }


def print_replayed(loader: Loader, made: Replayed, *, listed: bool, sheet: Path | None) -> None:
    """Print the step: its batch, and its records or the first of them."""
    card = loader.card()
    ranks = f", rank {card.rank} of {card.world_size}" if card.world_size > 1 else ""
    say(
        f"{loader.dataset.path}: epoch {made.epoch}, step {made.step}{ranks}: {count_of(len(made), 'record')}"
    )
    print_fields(
        {
            "batch": ", ".join(_text(_form(part)) for part in made.batch),
            "digest": made.digest(),
            **({"skipped": count_of(len(made.skipped), "bad record")} if made.skipped else {}),
            **({"sheet": sheet} if sheet else {}),
        }
    )
    shown = made.records if listed else made.records[:FIRST]
    say(f"  {'number':>9}{'label':>7}  {'crop':<26}key")
    for record in shown:
        say(
            f"  {record.number:>9}{record.label:>7}  {_crop(record):<26}{printable(record.key)}{_reason(record)}"
        )
    if left := len(made.records) - len(shown):
        say(f"  and {left:,} more: --records lists them")


def _crop(record: ReplayedRecord) -> str:
    if record.shown is None:
        return "-"
    x, y, width, height = (f"{side:.6g}" for side in record.shown[:4])
    return f"{width}x{height}+{x}+{y}{' flip' if record.shown.is_mirrored else ''}"


def _reason(record: ReplayedRecord) -> str:
    return f"  skipped: {printable(record.skipped)}" if record.skipped is not None else ""


def _form(part: Any) -> dict[str, Any]:
    """The form of a part of a batch."""
    if isinstance(part, np.ndarray):
        return {"dtype": part.dtype.name, "shape": list(part.shape)}
    if isinstance(part, dict):
        return {"columns": {name: _form(value) for name, value in part.items()}}
    return {"list": len(part)}


def _text(form: dict[str, Any]) -> str:
    if "dtype" in form:
        return f"{form['dtype']} {form['shape']}"
    if "list" in form:
        return f"a list of {form['list']}"
    return ", ".join(f"{name} {_text(value)}" for name, value in form["columns"].items())
