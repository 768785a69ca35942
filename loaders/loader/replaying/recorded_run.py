"""A run as a file has it: its card, or a loader's state, which has the card in it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardprep.formats.errors import DataError, UnknownVersion
from shardprep.formats.sources.listing.text_file import read_small_file
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.order.receipt import natural

from .run_card import FORMAT, RunCard

LARGEST_STATE = 16 << 20  # bytes; the skipped records make it long
ADVICE = "a state is loader.state_dict(), written as JSON"


@dataclass(frozen=True)
class StatePlace:
    """The place of a state: the ``epoch`` went on at ``start``, and all ranks have reached ``place``."""

    epoch: int
    start: int
    place: int

    def last_step(self, card: RunCard) -> int | None:
        """The step that was delivered last, counted from ``start``; None where none was in this epoch."""
        taken = self.place - self.start
        return -(-taken // (card.batch_size * card.world_size)) - 1 if taken > 0 else None


@dataclass(frozen=True)
class RecordedRun:
    """The ``card`` of a run, and the ``place`` of a state; None for a card."""

    card: RunCard
    place: StatePlace | None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a card, or a state as JSON. Raises DataError for anything else, UnknownVersion, OSError."""
        file = user_path(path)
        data = read_small_file(file, LARGEST_STATE)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"is neither a run card nor a state; {ADVICE}", path=file) from error
        if isinstance(value, dict) and value.get("format") == FORMAT:
            return cls(RunCard.load(file), None)
        return cls._of_state(value, file)

    @classmethod
    def _of_state(cls, value: Any, file: Path) -> Self:
        try:
            place = StatePlace(*(natural(value[name]) for name in ("epoch", "start", "place")))
            card = RunCard.from_json(value["card"])
        except (KeyError, TypeError, ValueError) as error:
            reason = "has no card, as those of older releases" if _is_state(value) else "is no loader's state"
            raise DataError(f"{reason}; {ADVICE}", path=file) from error
        except (DataError, UnknownVersion) as error:
            raise type(error)(f"its card {error.message}", path=file) from error
        return cls(card, place)


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and {"epoch", "place", "receipt"} <= value.keys()
