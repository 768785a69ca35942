"""Plans of batches, drawn a little ahead of their delivery."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .pickled import Pickled
from .slots import CargoArrays
from .work import Items


@dataclass(frozen=True, eq=False)
class Shipment:
    """The items of a batch, and what goes with them to its slot's cargo: where it begins there, and what it is.

    ``written`` are arrays that the workers write there, rather than in the fields of the slot's layout.
    """

    items: Items
    cargo: tuple[tuple[int, Pickled], ...] = ()
    written: CargoArrays | None = None


class Plans:
    """Draws from ``plans`` and knows what is still due; their error waits for the batches before it."""

    def __init__(self, plans: Iterable[npt.ArrayLike | Shipment], *, dtype: np.dtype[Any], rows: int) -> None:
        self._plans = iter(plans)
        self._dtype = dtype
        self._rows = rows
        self._outstanding = 0
        self._drained = False
        self._error: Exception | None = None

    def draw(self, enough: int) -> Iterable[Shipment]:
        """Further plans, at most ``enough``."""
        while enough > 0 and not self._drained:
            try:
                plan = self._checked(next(self._plans))
            except StopIteration:
                self._drained = True
            except Exception as error:  # raised again when it is due
                self._drained, self._error = True, error
            else:
                enough -= 1
                self._outstanding += 1
                yield plan

    def claim(self) -> bool:
        """Whether a drawn plan is due, and count it as delivered; when none is, raise the plans' error."""
        if self._outstanding:
            self._outstanding -= 1
            return True
        if self._error:
            raise self._error
        return False

    def _checked(self, plan: npt.ArrayLike | Shipment) -> Shipment:
        if isinstance(plan, Shipment):
            return replace(plan, items=self._checked_items(plan.items))
        return Shipment(self._checked_items(plan))

    def _checked_items(self, plan: npt.ArrayLike) -> Items:
        items = np.array(plan)
        if items.ndim != 1 or len(items) > self._rows:
            raise UsageError(f"a plan of shape {items.shape} does not fit a batch of {self._rows} rows")
        if len(items) and not np.can_cast(items.dtype, self._dtype, "same_kind"):
            raise UsageError(f"a plan of {items.dtype} was given where the work takes {self._dtype}")
        return items.astype(self._dtype)
