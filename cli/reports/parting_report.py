"""Where two runs part, as ``prep replay --diff`` finds and tells it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.cli.console.output import print_fields, print_json, say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.console.runs import RunOptions

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders.loader.replaying.parting import Parting
    from shardprep.loaders.loader.replaying.run_card import RunCard
    from shardprep.loaders.loader.replaying.settings import Differences


@dataclass(frozen=True)
class RunComparison:
    """Two runs on one dataset, to be compared over so many ``epochs``, with ``pixels`` by their values."""

    options: RunOptions
    cards: tuple[RunCard, RunCard]
    epochs: int
    pixels: bool

    def parting(self, form: Form) -> Parting | None:
        """Return where the runs part."""
        # start-up time: OpenCV
        from shardprep.loaders.loader.replaying.parting import first_parting, parting_of_datasets

        if parted := parting_of_datasets(*self.cards):
            return parted
        make = self.options.loader if self.pixels else self.options.ordering_loader
        with ExitStack() as opened:
            loaders = [opened.enter_context(make(card)) for card in self.cards]
            one, other = (loader.order_of(card) for loader, card in zip(loaders, self.cards, strict=True))
            progress, done = progress_in(form), count(1)
            per_step = max(card.batch_size for card in self.cards)
            total = self.epochs * max(loader.batches_per_epoch for loader in loaders) * per_step
            opened.enter_context(progress.task("comparing", records=total, size=0))
            return first_parting(
                one,
                other,
                range(self.epochs),
                pixels=self._differing_row(loaders) if self.pixels else None,
                step_done=lambda: progress.at(next(done) * per_step, 0),
            )

    def _differing_row(self, loaders: list[Any]) -> Any:
        one, other = loaders
        return lambda epoch, step: one.replay(epoch, step).first_difference(other.replay(epoch, step))

    @property
    def differences(self) -> Differences:
        """All settings that differ."""
        from shardprep.loaders.loader.replaying.settings import differences  # start-up time: OpenCV

        return differences(*self.cards)


def print_parting(
    compared: RunComparison, parting: Parting | None, files: tuple[Path, Path], *, as_json: bool
) -> None:
    """Print where the runs of two files part."""
    if as_json:
        settings = {name: list(both) for name, both in compared.differences.items()}
        found = parting.to_json() if parting else None
        print_json({"runs": list(map(str, files)), "parting": found, "settings": settings})
        return
    if parting is None:
        say(f"the runs do not part in {compared.epochs} of their epochs")
    else:
        place = f"epoch {parting.epoch}, step {parting.step}, row {parting.row}"
        say(f"the runs part at {place}: {MEANINGS[parting.kind]}")
        print_fields(_fields(parting))
    because = parting.because if parting else {}
    others = {name: both for name, both in compared.differences.items() if name not in because}
    if others:
        say("other settings that differ:")
        print_fields({name: " | ".join(both) for name, both in others.items()})


MEANINGS = {
    "dataset": "they read other datasets",
    "order": "another record",
    "labels": "another label",
    "columns": "other parts in a batch",
    "augmentation": "other augmentation",
    "pixels": "other values",
}


def _fields(parting: Parting) -> dict[str, object]:
    numbers = ("none" if number is None else f"{number}" for number in parting.numbers)
    records: dict[str, object] = {} if parting.kind == "dataset" else {"record": " | ".join(numbers)}
    return records | {name: " | ".join(both) for name, both in parting.because.items()}
