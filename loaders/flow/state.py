"""The place of a flow within its passes, as a state that another process can load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.core.meter import PassMeter
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.order.receipt import natural

STATE_VERSION = 1


@dataclass(frozen=True)
class FlowPlace:
    """The place in pass ``pass_number`` before which ``items`` items were delivered."""

    pass_number: int = 0
    items: int = 0


class PassProgress:
    """The place of a pass that began at ``start`` and is counted by ``meter``."""

    def __init__(self, start: FlowPlace, meter: PassMeter) -> None:
        self._start = start
        self._meter = meter

    def place(self, node: Node) -> FlowPlace:
        """Return the place after the items delivered so far; after the last, the start of the next pass."""
        number, items = self._start.pass_number, self._start.items + self._meter.items
        is_last = node.length.is_exact and items >= node.length.items
        return FlowPlace(number + 1) if is_last or self._meter.is_over else FlowPlace(number, items)


def state_of(node: Node, place: FlowPlace) -> dict[str, Any]:
    """Return the place as JSON values. Raises UsageError within a pass of items that cannot be picked."""
    check_place(node, place)
    return {
        "version": STATE_VERSION,
        "flow": list(structure_of(node)),
        "pass": place.pass_number,
        "items": place.items,
    }


def place_from(node: Node, state: object) -> FlowPlace:
    """Return the place of a state. Raises UsageError for a value that is no state, or another flow's."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a flow, or not of version {STATE_VERSION}")
    _check_structure(node, state.get("flow"))
    try:
        place = FlowPlace(natural(state.get("pass")), natural(state.get("items")))
    except ValueError as error:
        raise UsageError(f"not the state of a flow: {error}") from error
    check_place(node, place)
    return place


def check_place(node: Node, place: FlowPlace) -> None:
    """Raise UsageError where a pass cannot begin at this place."""
    if place.items and not node.can_pick:
        raise UsageError(
            f"{_first_without_numbers(node).label} has no items by number, so that this flow goes on at the beginning "
            "of a pass only: take its state between two passes"
        )
    if place.items and place.items > node.length.items:
        raise UsageError(f"not the state of this flow: a pass has {node.length}, and not {place.items} items")


def structure_of(node: Node) -> Iterator[str]:
    """Yield the descriptions of a flow's steps and sources, from the last step on."""
    yield node.description
    for number, source in enumerate(node.sources):
        prefix = f"{number}. " if len(node.sources) > 1 else ""
        yield from (prefix + line for line in structure_of(source))


def _check_structure(node: Node, structure: object) -> None:
    if not isinstance(structure, list):
        raise UsageError("not the state of a flow: it has no list of steps")
    for here, there in zip_longest(structure_of(node), structure):
        if here != there:
            raise UsageError(
                f"the state is of another flow: it has {_quoted(there)} where this one has {_quoted(here)}"
            )


def _quoted(line: object) -> str:
    return "no step" if line is None else str(line)[:200]


def _first_without_numbers(node: Node) -> Node:
    """The first step or source from which on items cannot be picked."""
    for source in node.sources:
        if not source.can_pick:
            return _first_without_numbers(source)
    return node
