"""Where a receiver is in its passes, and what it has delivered of the one under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...formats.errors import DataError, UnknownVersion, UsageError
from ..receipt import Receipt
from .conversation import Delivery
from .terms import Terms

STATE_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Before ``step`` of a pass everything was delivered; and after it, the steps ``taken``."""

    pass_number: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    receipt: Receipt | None = None

    def after(self, made: Delivery, step: int, taken: Sequence[int], dataset: str) -> Place:
        """One more batch was delivered, now of which dataset is known."""
        before = self.receipt or Receipt(dataset, self.pass_number)
        receipt = before.add(made.delivered).skip(made.skipped)
        if len(made.left_out):
            receipt = receipt.leave_out(made.left_out)
        return Place(self.pass_number, step, tuple(taken), receipt)

    def empty(self, terms: Terms) -> Place:
        """A pass without any step, which leaves out all records there are."""
        receipt = Receipt(terms.dataset, self.pass_number).leave_out(range(max(0, terms.records)))
        return replace(self, receipt=receipt)

    def to_json(self, terms: Terms | None) -> dict[str, Any]:
        """What :func:`place_from_json` reads."""
        return {
            "version": STATE_VERSION,
            "terms": terms.to_json() if terms else None,
            "pass": self.pass_number,
            "step": self.step,
            "taken": list(self.taken),
            "receipt": self.receipt.to_json() if self.receipt else None,
        }


def place_from_json(state: object) -> tuple[Place, Terms | None]:
    """Raises UsageError for what is no state of a RemoteSource."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a RemoteSource, or not of version {STATE_VERSION}")
    terms, receipt = state.get("terms"), state.get("receipt")
    taken = state.get("taken")
    try:
        return Place(
            _natural(state.get("pass")),
            _natural(state.get("step")),
            tuple(map(_natural, taken if isinstance(taken, list) else [None])),
            None if receipt is None else Receipt.from_json(receipt),
        ), None if terms is None else Terms.from_json(terms)
    except (DataError, UnknownVersion, UsageError) as error:
        raise UsageError(f"not the state of a RemoteSource: {error}") from error


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise UsageError(f"{value!r} is no number of a pass or step")
    return value
