"""The position of a receiver in its passes, and the receipt of the current one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.loaders.order.receipt import Receipt, natural

from .messages import Delivery
from .source_terms import SourceTerms

STATE_VERSION = 1


@dataclass(frozen=True)
class Position:
    """All steps of a pass before ``step`` were delivered; of the later ones, those in ``taken``."""

    pass_number: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    receipt: Receipt | None = None

    def after(self, made: Delivery, step: int, taken: Sequence[int], dataset: str) -> Position:
        """Return the position after one more batch. ``dataset`` is what a new receipt is of."""
        before = self.receipt or Receipt(dataset, self.pass_number)
        receipt = before.add(made.delivered).skip(made.skipped)
        if len(made.left_out):
            receipt = receipt.leave_out(made.left_out)
        return Position(self.pass_number, step, tuple(taken), receipt)

    def empty(self, terms: SourceTerms) -> Position:
        """Return the position in a pass without steps, which leaves out all records."""
        receipt = Receipt(terms.dataset, self.pass_number).leave_out(range(max(0, terms.records)))
        return replace(self, receipt=receipt)

    def to_json(self, terms: SourceTerms | None) -> dict[str, Any]:
        """Return what :func:`position_from_json` reads."""
        return {
            "version": STATE_VERSION,
            "terms": terms.to_json() if terms else None,
            "pass": self.pass_number,
            "step": self.step,
            "taken": list(self.taken),
            "receipt": self.receipt.to_json() if self.receipt else None,
        }


def position_from_json(state: object) -> tuple[Position, SourceTerms | None]:
    """Return the position, and the terms where known. Raises UsageError."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a RemoteSource, or not of version {STATE_VERSION}")
    terms, receipt = state.get("terms"), state.get("receipt")
    taken = state.get("taken")
    try:
        return Position(
            natural(state.get("pass")),
            natural(state.get("step")),
            tuple(map(natural, taken if isinstance(taken, list) else [None])),
            None if receipt is None else Receipt.from_json(receipt),
        ), None if terms is None else SourceTerms.from_json(terms)
    except (DataError, UnknownVersion, UsageError, ValueError) as error:
        raise UsageError(f"not the state of a RemoteSource: {error}") from error
